"""What the stream guard costs: the same streams without it, with ``first_token``, with ``whole_stream``, in one run.

    python -m loadtest.guard                        about three minutes
    python -m loadtest.guard --rounds 2 --streams 20 --chunks 100

Rules of this file:

- one gateway, one set of processes; three routes that differ in their guard alone, chosen by a header of the client;
- the routes take turns within every round, each round in another order; costs are differences to the unguarded route, round
  by round;
- chunks come a few milliseconds apart, so that each is one write of the engine: what Envoy joins is not hidden in a mean.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from loadtest.client import Client, closed_loop
from loadtest.cpu import Meter
from loadtest.processes import StartError, processes, raise_open_files
from loadtest.report import interval, percentile, table, with_interval
from loadtest.responder import Reply
from loadtest.stage import MODEL, Arm, build

LEVELS = ("none", "first_token", "whole_stream")
_BODY = json.dumps(
    {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
).encode()


def guarded_routes(directory: Path) -> str:
    """Add the routes to the running service's configuration; returns its admin address."""
    path = directory / "extproc.yaml"
    settings: dict[str, Any] = yaml.safe_load(path.read_text())
    settings["routes"] = [
        {
            "name": level,
            "match": {"header": {"X-Guard": level}},
            "pool": "loadtest",
            "guard": {"level": level, "first_token": 30},
        }
        for level in LEVELS[1:]
    ]
    temporary = path.with_suffix(".new")
    temporary.write_text(yaml.safe_dump(settings, sort_keys=False))
    temporary.rename(path)
    return f"http://{settings['listen']['admin']}"


def wait_for_routes(admin: str, deadline_s: float = 15.0) -> None:
    """Until the service has taken them. Raises StartError."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{admin}/config", timeout=2) as reply:
                if json.load(reply)["routes"]:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise StartError("extproc did not take the guarded routes")


def guard_streams(admin: str) -> float:
    """Streams that the guard has watched so far."""
    with urllib.request.urlopen(f"{admin}/metrics", timeout=5) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("extproc_guard_streams_total "):
                return float(line.rpartition(" ")[2])
    return 0.0


async def measure(arm: Arm, admin: str, chosen: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """(number -> level -> a value a round)."""
    reply = Reply(chosen.chunks, chosen.interval_ms / 1e3)
    found: dict[str, dict[str, list[float]]] = {}
    errors: Counter[str] = Counter()
    client = Client(arm.target, timeout_s=120.0)
    order = list(LEVELS)
    try:
        for number_of_round in range(chosen.rounds + 1):
            for level in order:
                request = arm.target.request(_BODY, (*reply.header(), ("x-guard", level)))
                before = guard_streams(admin)
                meter = Meter({**arm.pids, "client": os.getpid()})
                samples = await closed_loop(
                    client,
                    itertools.repeat((request, True)),
                    concurrency=chosen.concurrency,
                    count=chosen.streams,
                )
                used = meter.lap()
                if number_of_round == 0:
                    continue  # everything warm
                watched = guard_streams(admin) - before
                if watched != (0 if level == "none" else chosen.streams):
                    raise StartError(f"{level}: the guard watched {watched:g} streams of {chosen.streams}")
                errors.update(f"{level} {one.error}" for one in samples if one.error)
                chunks = chosen.streams * chosen.chunks
                for process in ("envoy", "processor"):
                    cpu_us = used[process].cpu_s * 1e6
                    found.setdefault(f"{process} us/chunk", {}).setdefault(level, []).append(cpu_us / chunks)
                    found.setdefault(f"{process} us/stream", {}).setdefault(level, []).append(
                        cpu_us / chosen.streams
                    )
                ttfts = [(one.first_s - one.sent_s) * 1e3 for one in samples if not one.error]
                found.setdefault("TTFT p50 ms", {}).setdefault(level, []).append(percentile(ttfts, 0.5))
            order.append(order.pop(0))
    finally:
        await client.close()
    if errors:
        print(f"errors: {dict(errors)}")
    return found


def rows(found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """Each number without a guard, and what each level adds."""
    made = []
    for name, levels in found.items():
        added = [
            interval([one - base for one, base in zip(levels[level], levels["none"], strict=True)])
            for level in LEVELS[1:]
        ]
        digits = 2 if "ms" in name else 1
        made.append(
            [
                name,
                with_interval(interval(levels["none"]), digits),
                *(with_interval(one, digits) for one in added),
            ]
        )
    return made


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=60, help="streams a round and level")
    parser.add_argument("--chunks", type=int, default=200, help="events a stream")
    parser.add_argument("--interval-ms", type=float, default=5.0, help="between the events of a stream")
    parser.add_argument("--concurrency", type=int, default=10)
    chosen = parser.parse_args()
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="guard-") as name, processes(Path(name)) as children:
        try:
            stage = build(children, ["extproc"], engines=2)
            admin = guarded_routes(Path(name) / "extproc")
            wait_for_routes(admin)
            found = asyncio.run(measure(stage.arms["extproc"], admin, chosen))
        except StartError as error:
            sys.exit(str(error))
    title = (
        f"{chosen.rounds} rounds of {chosen.streams} streams of {chosen.chunks} events, {chosen.interval_ms:g} ms "
        f"apart, {chosen.concurrency} at once; CPU of one process, mean [95 % interval]"
    )
    print(table(title, ["", "no guard", "first_token adds", "whole_stream adds"], rows(found)))


if __name__ == "__main__":
    main()
