"""Is the simulator true? One workload through real vLLM servers and through the model of them, side by side.

    tests/engine/install_vllm.sh DIR                     # once: vLLM for CPUs and a tiny model, 4 GB
    python -m loadtest.fidelity --vllm-dir DIR --json fidelity.json

Multi-turn chats that share a system prompt go open loop through Envoy and extproc to two real vLLM servers under three
policies, in turn, each run with a cache salt of its own, so none finds what another left. Before that both servers
answer single prompts and small batches at the same time; the engine model's constants are fitted to those answers
(``loadtest/engine_fit.py``), and one factor to the median TTFT of the first policy: how much slower the machine is when
gateway and client work too. Hit ratios, the other policies and the shape are foretold. Then ``extproc replay`` plays the
same arrivals, with the token ids that vLLM's own tokenizer gives, under the same policies against two engines with these
constants.

Real engines hang now and then, for a second or two on a CPU (new shapes are compiled, the machine does something else).
No model foretells that, so both servers' counters are read ten times a second, and the replay's engines hang at the same
times for as long (``stall`` faults). What is compared is how policies and engines behave around it.

Compared: share of prompt tokens found in caches (by ``usage``), TTFT, the order of the policies by each, and the shape of
TTFT (p90 over p50; the largest distance between the two distributions, each divided by its median). Answers of a
conversation are written beforehand, so that every run sends the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import xxhash

from extproc.engines.vllm import VLLM
from extproc.replay.arrival import Arrival
from extproc.replay.driver import Driver
from extproc.replay.faults import Fault
from extproc.replay.policies import parse_policy
from extproc.replay.result import quantile
from extproc.replay.setup import Setup
from loadtest.engine_fit import DecodeSample, Fit, PrefillSample, fit
from tests.engine.vllm_server import BLOCK, MODEL, Vllm
from tests.gateway.envoy_process import free_port
from tests.gateway.gateway_process import cluster, running_gateway

POLICIES = ("round-robin", "least-requests", "expected-latency")
SYSTEM_TOKENS = 600
FIRST_TOKENS = 500
TURN_TOKENS = 300
ANSWER_TOKENS = 60
OUTPUT_TOKENS = 16
TURNS = 6
MAX_SEQS = 16
BATCH_TOKENS = 2048
CALIBRATION_SIZES = (128, 256, 512, 1024, 1536, 1900)
CALIBRATION_REPEATS = 4
DECODE_TOKENS = 40
MODEL_SIZE = {
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
}
"""Larger than the tests' model: there, what surrounds the engine takes longer than a prefill."""
SEEDS = 6
POLL_S = 0.1
TIE = 0.05
"""Policies closer than this are not told apart."""

# With the space before it each is one token for the tiny model's tokenizer.
_LIST = (
    "river stone window morning paper garden letter winter market silver thunder house water night school story music "
    "family people country summer city table street mother father number party power money"
)
_WORDS = _LIST.split()

Message = dict[str, str]


@dataclass(slots=True, frozen=True)
class Ask:
    """One turn of one chat."""

    at: float
    messages: list[Message]


@dataclass(slots=True, frozen=True)
class Answer:
    """What a client saw."""

    ttft_s: float
    rest_s: float
    """From the first token to the last."""
    prompt: int
    cached: int
    endpoint: str


@dataclass(slots=True, frozen=True)
class Outcome:
    """One policy, real or simulated."""

    hit_ratio: float
    ttfts: list[float]
    shares: list[float]
    """Of the requests, by endpoint."""

    def at(self, share: float) -> float:
        """A quantile of TTFT."""
        return quantile(self.ttfts, share) or 0.0

    def summary(self) -> dict[str, Any]:
        """In numbers, for JSON."""
        return {
            "requests": len(self.ttfts),
            "hit_ratio": round(self.hit_ratio, 4),
            "ttft_p50_s": round(self.at(0.5), 4),
            "ttft_p90_s": round(self.at(0.9), 4),
            "ttft_mean_s": round(statistics.fmean(self.ttfts), 4),
            "p90_over_p50": round(self.at(0.9) / self.at(0.5), 3),
            "largest_share": round(max(self.shares), 3),
        }


@dataclass(slots=True, frozen=True)
class Progress:
    """What one engine's page showed at a time since the run's start."""

    at: float
    busy: bool
    tokens: float
    """Made since the engine started; grows at every step."""


def hangs(pages: Sequence[Progress], longest_step_s: float) -> list[tuple[float, float]]:
    """(start, seconds) of the times in which an engine had work and made no token for more than two of its longest
    steps; one such step is not counted."""
    found: list[tuple[float, float]] = []
    moved = None
    for before, page in itertools.pairwise(pages):
        if moved is None or not before.busy or page.tokens != before.tokens:
            if moved is not None and before.at - moved > 2 * longest_step_s:
                found.append((moved, before.at - moved - longest_step_s))
            moved = page.at if page.busy else None
    return found


def words(rng: random.Random, count: int) -> str:
    """So many words."""
    return " ".join(rng.choices(_WORDS, k=count))


def workload(chats: int, seed: int) -> list[Ask]:
    """Turns in order of time, over one second: chats begin over its first half, pauses are exponential."""
    rng = random.Random(f"fidelity {seed}")
    system = {"role": "system", "content": words(rng, SYSTEM_TOKENS)}
    asks = []
    for _ in range(chats):
        at, said = rng.random() / 2, [system]
        for turn in range(TURNS):
            size = int((TURN_TOKENS if turn else FIRST_TOKENS) * rng.lognormvariate(-0.18, 0.6))
            said = [*said, {"role": "user", "content": words(rng, max(size, 8))}]
            asks.append(Ask(at, said))
            said = [*said, {"role": "assistant", "content": words(rng, ANSWER_TOKENS)}]
            at += rng.expovariate(2 * TURNS)
    asks.sort(key=lambda ask: ask.at)
    last = asks[-1].at
    return [replace(ask, at=ask.at / last) for ask in asks]


def arrivals(asks: Sequence[Ask], tokens: Sequence[Sequence[int]], span_s: float) -> list[Arrival]:
    """The same for the replay. Each block's name is the hash of all tokens up to its end."""
    made = []
    for number, (ask, ids) in enumerate(zip(asks, tokens, strict=True)):
        chain, names = xxhash.xxh64(), []
        for start in range(0, len(ids), BLOCK):
            chain.update(json.dumps(ids[start : start + BLOCK]).encode())
            names.append(chain.intdigest() >> 1)
        made.append(Arrival(str(number), ask.at * span_s, len(ids), OUTPUT_TOKENS, names, BLOCK))
    return made


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    messages: Sequence[Message],
    salt: str,
    *,
    output: int = OUTPUT_TOKENS,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One streamed answer; its first body bytes come with the first token."""
    body = {
        "model": MODEL,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    began, times, text = time.perf_counter(), [], b""
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        async for chunk in reply.content.iter_any():
            times.append(time.perf_counter())
            text += chunk
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {text[:300]!r}")
        endpoint = reply.headers.get("x-gateway-endpoint", "")
    events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(times[0] - began, times[-1] - times[0], usage["prompt_tokens"], cached, endpoint)


async def calibrate(session: aiohttp.ClientSession, url: str, seed: int) -> tuple[list[Any], list[Any]]:
    """Samples of one engine: prompts one at a time, then decodes in batches."""
    rng = random.Random(f"calibration {seed}")

    async def one(size: int, output: int, salt: str) -> Answer:
        return await ask(session, url, [{"role": "user", "content": words(rng, size)}], salt, output=output)

    for size in (64, 1900, 1900):  # the first requests of all compile and allocate
        await one(size, 8, uuid4().hex)
    sizes = list(CALIBRATION_SIZES * CALIBRATION_REPEATS)
    rng.shuffle(sizes)
    prefills = []
    for size in sizes:
        answer = await one(size, 2, uuid4().hex)
        prefills.append(PrefillSample(answer.prompt, answer.ttft_s))
    decodes = []
    for count in (1, 4, 8):
        for size in (100, 1500):
            # All ask the same and find it cached: they decode together from the first step on.
            message, salt = [{"role": "user", "content": words(rng, size)}], uuid4().hex
            await ask(session, url, message, salt, output=2)
            answers = []
            for _ in range(1 if count > 1 else 3):
                answers += await asyncio.gather(
                    *(ask(session, url, message, salt, output=DECODE_TOKENS) for _ in range(count))
                )
            # An answer whose events came in one piece tells nothing.
            steps = [answer.rest_s / (DECODE_TOKENS - 1) for answer in answers if answer.rest_s > 0.01]
            held = count * (answers[0].prompt + DECODE_TOKENS // 2)
            if steps:
                decodes.append(DecodeSample(count, held, statistics.median(steps)))
    return prefills, decodes


async def fitted(session: aiohttp.ClientSession, engines: Sequence[Vllm]) -> Fit:
    """Constants of both engines together, measured while both work: they share this machine's cores."""
    samples = await asyncio.gather(
        *(calibrate(session, engine.url, number) for number, engine in enumerate(engines))
    )
    async with session.get(f"{engines[0].url}/metrics") as reply:
        state = VLLM.read(await reply.text(), 0.0)
    if state.kv_blocks is None or state.block_size is None:
        raise RuntimeError("the engine does not say how large its cache is")
    return fit(
        [sample for prefills, _ in samples for sample in prefills],
        [sample for _, decodes in samples for sample in decodes],
        block_size=state.block_size,
        kv_blocks=state.kv_blocks - 1,  # vLLM keeps one block for itself
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BATCH_TOKENS,
    )


async def tokenized(session: aiohttp.ClientSession, engine: Vllm, asks: Sequence[Ask]) -> list[list[int]]:
    """Token ids of every prompt by the engine's own tokenizer."""
    found = []
    for one in asks:
        async with session.post(
            f"{engine.url}/tokenize", json={"model": MODEL, "messages": one.messages}
        ) as reply:
            found.append(list((await reply.json())["tokens"]))
    return found


async def play(
    session: aiohttp.ClientSession,
    url: str,
    asks: Sequence[Ask],
    span_s: float,
    policy: str,
    engines: Sequence[Vllm] = (),
) -> tuple[list[Answer], list[list[Progress]]]:
    """All turns at their times, whatever the answers do; and what the engines' pages showed meanwhile."""
    loop, salt = asyncio.get_running_loop(), uuid4().hex
    began = loop.time() + 0.1
    pages: list[list[Progress]] = [[] for _ in engines]

    async def watch(engine: Vllm, shown: list[Progress]) -> None:
        while True:
            async with session.get(f"{engine.url}/metrics") as reply:
                state = VLLM.read(await reply.text(), 0.0)
            tokens = (state.generation_tokens_total or 0.0) + (state.first_tokens_total or 0.0)
            shown.append(Progress(loop.time() - began, bool(state.running or state.waiting), tokens))
            await asyncio.sleep(POLL_S)

    async def turn(one: Ask) -> Answer | None:
        await asyncio.sleep(began + one.at * span_s - loop.time())
        try:
            return await ask(session, url, one.messages, salt, headers={"X-Route": policy})
        except (RuntimeError, aiohttp.ClientError) as error:
            print(f"a request failed: {error}", flush=True)
            return None

    watchers = [asyncio.create_task(watch(*one)) for one in zip(engines, pages, strict=True)]
    try:
        answers = await asyncio.gather(*(turn(one) for one in asks))
        return [answer for answer in answers if answer is not None], pages
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


def seen(answers: Sequence[Answer]) -> Outcome:
    """What the clients of a policy saw."""
    homes = [answer.endpoint for answer in answers]
    return Outcome(
        sum(answer.cached for answer in answers) / sum(answer.prompt for answer in answers),
        sorted(answer.ttft_s for answer in answers),
        [homes.count(home) / len(homes) for home in sorted(set(homes))],
    )


def simulated(
    trace: Sequence[Arrival],
    found: Fit,
    policy: str,
    bytes_per_token: float,
    rounds: Sequence[Sequence[Fault]] = ((),),
) -> Outcome:
    """The same by the replay, over some seeds, which take the rounds' hangs in turn; times include what passes outside
    of the engine."""
    hits, ttfts, shares = [], [], []
    for seed in range(SEEDS):
        faults = tuple(rounds[seed % len(rounds)])
        setup = Setup((found.profile,) * 2, seed=seed, bytes_per_token=bytes_per_token, faults=faults)
        run = Driver(trace, setup, parse_policy(policy)).run()
        hits.append(run.hit_ratio)
        ttfts += [ttft + found.front_s for ttft in run.ttfts]
        shares.append([count / len(trace) for count in run.requests_per_engine])
    return Outcome(
        statistics.fmean(hits), sorted(ttfts), [statistics.fmean(one) for one in zip(*shares, strict=True)]
    )


def slowed(found: Fit, factor: float) -> Fit:
    """The same engine with everything taking ``factor`` times as long."""
    profile = found.profile
    return Fit(
        replace(
            profile,
            prefill_tokens_per_s=profile.prefill_tokens_per_s / factor,
            attention_quadratic=profile.attention_quadratic * factor,
            decode_base_s=profile.decode_base_s * factor,
            decode_per_seq_s=profile.decode_per_seq_s * factor,
            decode_per_kv_token_s=profile.decode_per_kv_token_s * factor,
        ),
        found.front_s * factor,
    )


def contention(
    trace: Sequence[Arrival],
    found: Fit,
    median_s: float,
    bytes_per_token: float,
    rounds: Sequence[Sequence[Fault]],
) -> float:
    """How much slower than alone the machine was in the first policy's run, by its median TTFT (0.5 to 8): client,
    gateway and engines share cores, which no sample of an engine alone shows. The other policies are foretold."""
    low, high = 0.5, 8.0
    for _ in range(8):
        middle = math.sqrt(low * high)
        if simulated(trace, slowed(found, middle), POLICIES[0], bytes_per_token, rounds).at(0.5) < median_s:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def distance(one: Outcome, other: Outcome) -> float:
    """Largest difference of the distributions of TTFT over its median: 0 is the same shape, 1 nothing in common."""
    first = [ttft / one.at(0.5) for ttft in one.ttfts]
    second = [ttft / other.at(0.5) for ttft in other.ttfts]
    return max(
        abs(
            sum(value <= at for value in first) / len(first)
            - sum(value <= at for value in second) / len(second)
        )
        for at in [*first, *second]
    )


def reversed_pairs(real: Mapping[str, float], model: Mapping[str, float]) -> list[str]:
    """Pairs of policies that both sides tell apart by more than :data:`TIE`, and put in opposite orders."""

    def apart(values: Mapping[str, float], one: str, other: str) -> int:
        ratio = values[one] / values[other]
        return (ratio > 1 + TIE) - (ratio < 1 / (1 + TIE))

    return [
        f"{one}, {other}"
        for one, other in combinations(real, 2)
        if apart(real, one, other) * apart(model, one, other) < 0
    ]


def compared(real: Mapping[str, Outcome], model: Mapping[str, Outcome]) -> dict[str, Any]:
    """Both sides, and where they disagree, for JSON."""
    orders = {}
    for by in ("hit_ratio", "ttft_p50_s", "ttft_p90_s", "ttft_mean_s"):
        sides = [{policy: side[policy].summary()[by] for policy in side} for side in (real, model)]
        told, foretold = (sorted(side, key=side.__getitem__, reverse=by == "hit_ratio") for side in sides)
        orders[by] = {"real": told, "simulated": foretold, "reversed": reversed_pairs(*sides)}
    policies = {
        policy: {
            "real": real[policy].summary(),
            "simulated": model[policy].summary(),
            "shape_distance": round(distance(real[policy], model[policy]), 3),
        }
        for policy in real
    }
    return {"policies": policies, "orders": orders}


def table(document: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = [
        f"{'policy':17} {'':9} {'hit ratio':>9} {'TTFT p50':>9} {'p90':>9} {'mean':>9} {'p90/p50':>8} {'shape distance':>15}"
    ]
    for policy, sides in document["policies"].items():
        for side in ("real", "simulated"):
            row = sides[side]
            apart = f"{sides['shape_distance']:.2f}" if side == "simulated" else ""
            times = "".join(
                f"{row[name] * 1e3:7.0f} ms" for name in ("ttft_p50_s", "ttft_p90_s", "ttft_mean_s")
            )
            lines.append(
                f"{policy:17} {side:9} {row['hit_ratio']:9.1%} {times} {row['p90_over_p50']:8.2f} {apart:>15}"
            )
    for policy, turns in document["hangs_s"].items():
        seconds = [one for turn in turns for one in turn]
        lines.append(f"{policy}: engines hung {len(seconds)} times, {sum(seconds):.1f} s in all")
    for by, sides in document["orders"].items():
        same = f"REVERSED: {'; '.join(sides['reversed'])}" if sides["reversed"] else "no pair reversed"
        lines.append(
            f"{by}: {same}: real {' > '.join(sides['real'])}; simulated {' > '.join(sides['simulated'])}"
        )
    return "\n".join(lines)


def span_of(tokens: Sequence[Sequence[int]], found: Fit, load: float) -> float:
    """Seconds over which two engines without any cache would be busy to ``load``."""
    profile = found.profile
    step = profile.decode_base_s + profile.decode_per_seq_s
    work = sum(profile.prefill_s(len(ids)) + step * OUTPUT_TOKENS for ids in tokens)
    return work / 2 / load


async def measure(engines: Sequence[Vllm], wanted: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Fit, run and replay, with two servers that run and have done nothing yet."""
    routes = [
        {"name": policy, "match": {"header": {"X-Route": policy}}, "pool": "pool", "strategy": policy}
        for policy in POLICIES
    ]
    settings = {"responses": {"headers": True}, "logging": {"level": "warning"}, "routes": routes}
    clusters = [cluster(f"vllm-{number}", one.address, model=MODEL) for number, one in enumerate(engines)]
    asks = workload(wanted.chats, wanted.seed)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
    ) as session:
        found = await fitted(session, engines)
        print(f"fitted: front {found.front_s * 1e3:.1f} ms, {found.profile}", flush=True)
        tokens = await tokenized(session, engines[0], asks)
        span = wanted.span_s or span_of(tokens, found, wanted.load)
        load = span_of(tokens, found, 1.0) / span
        print(
            f"{len(asks)} requests over {span:.0f} s: {load:.0%} of what both can do without caches",
            flush=True,
        )
        answers: dict[str, list[Answer]] = {policy: [] for policy in POLICIES}
        faults: dict[str, list[list[Fault]]] = {policy: [] for policy in POLICIES}
        longest_s = 2 * (found.profile.decode_base_s + found.profile.prefill_s(BATCH_TOKENS))
        async with running_gateway(work, clusters, settings) as gateway:
            for policy in POLICIES:  # connections, and what extproc does at its first requests
                await play(session, gateway.url, asks[:4], 2.0, policy)
            for turn in range(wanted.rounds):
                first = turn % len(
                    POLICIES
                )  # each comes first, in the middle and last: a machine's mood drifts
                for policy in (*POLICIES[first:], *POLICIES[:first]):
                    heard, shown = await play(session, gateway.url, asks, span, policy, engines)
                    answers[policy] += heard
                    faults[policy].append(
                        [
                            Fault("stall", number, at_s=max(at, 0.0), for_s=seconds)
                            for number, pages in enumerate(shown)
                            for at, seconds in hangs(pages, longest_s)
                        ]
                    )
                    print(f"real {policy}: {seen(answers[policy]).summary()}", flush=True)
    sizes = [len(ids) for ids in tokens]
    told = sum(len(message["content"]) for one in asks for message in one.messages)
    trace = arrivals(asks, tokens, span)
    outcomes = {policy: seen(answers[policy]) for policy in POLICIES}
    size, first = told / sum(sizes), POLICIES[0]
    factor = contention(trace, found, outcomes[first].at(0.5), size, faults[first])
    found = slowed(found, factor)
    model = {policy: simulated(trace, found, policy, size, faults[policy]) for policy in POLICIES}
    return {
        "contention": round(factor, 3),
        "hangs_s": {
            policy: [[round(fault.for_s, 2) for fault in turn] for turn in turns]
            for policy, turns in faults.items()
        },
        "requests": len(asks),
        "rounds": wanted.rounds,
        "span_s": round(span, 2),
        "load_without_caches": round(load, 3),
        "prompt_tokens": {"min": min(sizes), "mean": round(statistics.fmean(sizes)), "max": max(sizes)},
        "front_s": found.front_s,
        "profile": asdict(found.profile),
        **compared(outcomes, model),
    }


def installation(vllm_dir: Path, work: Path) -> Path:
    """The same vLLM and tokenizer with a model of :data:`MODEL_SIZE`."""
    folder = work / "engine"
    shutil.copytree(vllm_dir / "model", folder / "model")
    (folder / "venv").symlink_to((vllm_dir / "venv").resolve())
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MODEL_SIZE))
    return folder


async def started(wanted: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The same with servers of its own."""
    flags = (
        "--max-num-batched-tokens",
        str(BATCH_TOKENS),
        "--num-gpu-blocks-override",
        str(wanted.kv_blocks),
    )
    folder = installation(wanted.vllm_dir, work)
    engines = [Vllm(folder, work, free_port(), free_port(), free_port(), flags, "1") for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.stop)
        print("starting two vLLM servers (a minute or two)", flush=True)
        await asyncio.gather(*(engine.start() for engine in engines))
        return await measure(engines, wanted, work)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The simulator and real vLLM servers, side by side.")
    parser.add_argument("--vllm-dir", type=Path, required=True, help="what install_vllm.sh filled")
    parser.add_argument("--chats", type=int, default=24, help=f"conversations of {TURNS} turns")
    parser.add_argument("--kv-blocks", type=int, default=800, help=f"of {BLOCK} tokens, of each server")
    parser.add_argument("--load", type=float, default=0.9, help="of what both can do without caches")
    parser.add_argument("--span-s", type=float, help="seconds of one run, instead of --load")
    parser.add_argument("--rounds", type=int, default=1, help="real runs of each policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        document = asyncio.run(started(wanted, Path(work)))
    print(f"\nfactor {document['contention']}, fitted to the median TTFT of {POLICIES[0]}\n{table(document)}")
    if wanted.json:
        Path(wanted.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
