"""Whether memory stays on a plateau: a million prompts, no two alike, through parsing, decision, record and learning.

    python -m loadtest.plateau                       # 1,000,000 prompts of 4 KB
    python -m loadtest.plateau --prompts 200000 --kv-tokens 0

Nothing repeats that a client can choose: text, session, user, cache salt, and one request in twenty asks for a model
nobody has. With ``--kv-tokens 0`` engines do not say how large their caches are, and the index's own cap is the
bound. Resident memory is printed as it goes; the verdict compares the last half with the quarter before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time

from extproc.admission.dispatcher import Considered
from extproc.api.parse import parse
from extproc.api.request import RequestHead
from extproc.core import Core
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import EndpointSpec
from extproc.ledger import Settlement
from extproc.outcome import End, Usage
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.rejection import Rejection
from extproc.telemetry.decision import record_of, record_of_rejection
from extproc.telemetry.ring import DecisionRing
from loadtest.cpu import rss_bytes

_BLOCK_SIZE = 16
_ALLOWED_GROWTH = 0.05
_OPEN = 64
"""Requests open at a time."""


def build(endpoints: int, kv_tokens: int, ring: DecisionRing) -> Core:
    """A core in front of so many engines that have said how large their caches are (0: have said nothing)."""

    def considered(seen: Considered, now: float) -> None:
        ring.add(record_of(seen, now, 0.0))

    def settled(settlement: Settlement, now: float) -> None:
        ring.settle(settlement)

    core = Core(rng=random.Random(1), seed=7, on_considered=considered, on_settled=settled)
    specs = [
        EndpointSpec(f"replica-{number}", "10.0.0.1:8000", "pool", models=("model",))
        for number in range(endpoints)
    ]
    core.install(Router({"pool": Pool("pool", models=("model",))}), specs)
    if kv_tokens:
        for endpoint in core.fleet.endpoints.values():
            state = EngineState(
                at=0.0, running=0.0, kv_blocks=kv_tokens // _BLOCK_SIZE, block_size=_BLOCK_SIZE
            )
            core.fleet.scraped(endpoint, state, 0.0)
    return core


def body(number: int, size: int, rng: random.Random) -> bytes:
    """A chat request like no other."""
    said = {
        "model": f"nobody-has-{number}" if number % 20 == 0 else "model",
        "user": f"user-{number}",
        "messages": [{"role": "user", "content": rng.randbytes(size // 2).hex()}],
        "stream": True,
    }
    if number % 10 == 1:
        said["cache_salt"] = f"salt-{number}"
    return json.dumps(said).encode()


def decide(
    core: Core, ring: DecisionRing, number: int, size: int, now: float, rng: random.Random
) -> End | None:
    """One request up to its decision; returns how it will end, None when it was refused."""
    headers = {"content-type": "application/json", "x-session-id": f"session-{number}"}
    head = RequestHead(f"request-{number}", "POST", "/v1/chat/completions", "", headers)
    request = parse(head, body(number, size, rng))
    decision = core.dispatcher.decide(request, now)
    if isinstance(decision, Rejection):
        ring.add(record_of_rejection(request, decision, now))
        return None
    spec = decision.choices[0].endpoint.spec
    usage = Usage(size // 4, 64, 0)
    return End(
        request.id, spec.cluster, spec.address, 200, ttft_s=0.1, engine_s=1.0, duration_s=1.0, usage=usage
    )


def run(prompts: int, size: int, endpoints: int, kv_tokens: int) -> bool:
    """Print the table; whether memory stayed on a plateau."""
    rng, ring = random.Random(2), DecisionRing(1000)
    core = build(endpoints, kv_tokens, ring)
    waiting: list[End] = []
    levels: list[int] = []
    started, now, every = time.perf_counter(), 1.0, max(prompts // 20, 1)
    print(
        f"{prompts} prompts of {size} bytes, {endpoints} endpoints, index bound {core.view.index.cap} entries"
    )
    print("   prompts   RSS MiB   index entries   models   records   us a request")
    for number in range(prompts):
        now += 0.005
        end = decide(core, ring, number, size, now, rng)
        if end is not None:
            waiting.append(end)
        if len(waiting) > _OPEN:
            core.take(waiting.pop(0), now)
        if number % 200 == 0:
            core.housekeep(now)
        if (number + 1) % every == 0:
            gc.collect()
            levels.append(rss_bytes(os.getpid()))
            each = (time.perf_counter() - started) / (number + 1) * 1e6
            print(
                f"{number + 1:10d} {levels[-1] / 2**20:9.1f} {core.view.index.entries:15d}"
                f" {len(core.models):8d} {len(ring):9d} {each:14.0f}",
                flush=True,
            )
    half, quarter = levels[len(levels) // 2 :], levels[len(levels) // 4 : len(levels) // 2]
    growth = max(half) / max(quarter) - 1.0
    flat = growth <= _ALLOWED_GROWTH
    verdict = "a plateau" if flat else "GROWING"
    print(f"{verdict}: the last half is {growth:+.1%} against the quarter before it")
    return flat


def main() -> None:
    """Exit code 1 when memory grows."""
    parser = argparse.ArgumentParser(description="Memory over a million unique prompts.")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=4000, help="bytes of a prompt")
    parser.add_argument("--endpoints", type=int, default=16)
    parser.add_argument(
        "--kv-tokens", type=int, default=440_000, help="tokens in an engine's KV cache; 0: not told"
    )
    said = parser.parse_args()
    sys.exit(0 if run(said.prompts, said.size, said.endpoints, said.kv_tokens) else 1)


if __name__ == "__main__":
    main()
