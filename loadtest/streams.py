"""Many streams at once: what they cost extproc and Envoy while they only stream.

    python -m loadtest.streams --streams 1000
    python -m loadtest.streams --streams 5000 --arm trivial

Rules of this file:

- a wave of short requests comes first, so that memory which any load brings (allocator, HTTP/2, caches) is
  there before the first reading; what grows afterwards belongs to open streams;
- memory is read with half of the streams open and with all: the slope between them is free of what comes
  only once;
- CPU while streaming is compared with CPU while idle, each over a window of its own;
- every stream ends, complete or because its client leaves, before the last reading.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client import Client, Sample, Shot, open_loop
from loadtest.cpu import Meter, Usage
from loadtest.processes import StartError, processes, raise_open_files
from loadtest.report import number, table, write_json
from loadtest.responder import Reply
from loadtest.stage import MODEL, Arm, Stage, build
from loadtest.workload import Ask, block

_FILES_A_STREAM = 2
"""Envoy's sockets for one stream: to the client and to the engine."""


@dataclass(slots=True)
class Findings:
    """What was read, by process."""

    streams: int
    chunks_per_s: float = 0.0
    idle: dict[str, Usage] = field(default_factory=dict)
    streaming: dict[str, Usage] = field(default_factory=dict)
    rss_before: dict[str, int] = field(default_factory=dict)
    rss_half: dict[str, int] = field(default_factory=dict)
    rss_all: dict[str, int] = field(default_factory=dict)
    rss_after: dict[str, int] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    def rows(self) -> dict[str, dict[str, float]]:
        """The numbers of each process."""
        found = {}
        for name, used in self.streaming.items():
            idle = self.idle[name]
            half = self.streams - self.streams // 2
            found[name] = {
                "idle ms/s": idle.cores * 1e3,
                "streaming ms/s": used.cores * 1e3,
                "us/chunk": (used.cores - idle.cores) / self.chunks_per_s * 1e6,
                "KiB/stream": (self.rss_all[name] - self.rss_before[name]) / self.streams / 1024,
                "KiB/stream, second half": (self.rss_all[name] - self.rss_half[name]) / half / 1024,
                "RSS before MiB": self.rss_before[name] / 2**20,
                "RSS all MiB": self.rss_all[name] / 2**20,
                "RSS after MiB": self.rss_after[name] / 2**20,
            }
        return found


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def measure(
    stage: Stage, arm: Arm, *, streams: int, interval_s: float, window_s: float, ramp: float
) -> Findings:
    """Ramp up, read, hold, read, let go, read."""
    client = Client(arm.target, max_open=streams + 100, timeout_s=600.0)
    body = Ask(0.0, block("streams", "1"), 16).body(MODEL, stream=True)
    meter = Meter({**arm.pids, "engine": stage.engine_pid, "client": os.getpid()})
    found = Findings(streams)
    samples: list[Sample] = []

    def rss() -> dict[str, int]:
        return {name: used.rss_bytes for name, used in meter.lap().items()}

    def start(request: bytes) -> None:
        client.submit(request, Sample(client.loop.time(), True), samples.append)

    async def open_more(wanted: int, request: bytes) -> None:
        begun = client.loop.time()
        for opened in range(wanted):
            wait = begun + opened / ramp - client.loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            start(request)

    try:
        short = arm.target.request(body, Reply(3).header())
        wave = (Shot(place / ramp, short, True) for place in range(streams))
        for sample in await open_loop(client, wave, drain_s=30.0):
            if sample.error:
                found.errors[f"wave {sample.error}"] += 1
        await asyncio.sleep(1.0)
        found.rss_before = rss()
        await asyncio.sleep(window_s)
        found.idle = meter.lap()

        # Far more chunks than will be read: the client leaves at the end.
        long = arm.target.request(body, Reply(1_000_000, interval_s).header())
        half = streams // 2
        await open_more(half, long)
        await _until(lambda: client.streaming + len(samples) >= half, 60.0)
        found.rss_half = rss()
        await open_more(streams - half, long)
        await _until(lambda: client.streaming + len(samples) >= streams, 60.0)
        await asyncio.sleep(1.0)
        found.rss_all = rss()
        running = client.streaming
        reads = client.gaps.total
        await asyncio.sleep(window_s)
        found.streaming = meter.lap()
        found.chunks_per_s = (client.gaps.total - reads) / window_s or float("nan")
        for sample in samples:
            found.errors[sample.error or "ended early"] += 1
        if running < streams:
            found.errors["not streaming"] += streams - running
        client.abort()
        await asyncio.sleep(2.0)
        found.rss_after = rss()
        return found
    finally:
        await client.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.streams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=1_000, help="at once (default 1,000)")
    parser.add_argument("--arm", choices=("bare", "trivial", "extproc"), default="extproc")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between tokens (default 1)")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of each CPU reading (default 10)")
    parser.add_argument("--ramp", type=float, default=200.0, help="new streams a second (default 200)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    return parser


def main() -> None:
    """Parse, start everything, measure, print, end everything."""
    parser = _parser()
    given = parser.parse_args()
    if given.streams < 2 or min(given.interval, given.window, given.ramp) <= 0:
        parser.error("streams must be two or more, interval, window and ramp above zero")
    files = raise_open_files()
    if given.streams * _FILES_A_STREAM + 500 > files:
        parser.error(f"{given.streams} streams need more open files than this machine allows ({files})")
    with tempfile.TemporaryDirectory(prefix="loadtest-") as directory, processes(Path(directory)) as children:
        try:
            stage = build(children, [given.arm])
            found = asyncio.run(
                measure(
                    stage,
                    stage.arms[given.arm],
                    streams=given.streams,
                    interval_s=given.interval,
                    window_s=given.window,
                    ramp=given.ramp,
                )
            )
        except (StartError, FileNotFoundError) as error:
            sys.exit(str(error))
        except TimeoutError:
            sys.exit("the streams did not all begin within a minute; try fewer, or a slower --ramp")
    rows = found.rows()
    names = list(next(iter(rows.values())))
    title = f"{given.arm}: {given.streams:,} streams, {number(found.chunks_per_s, 0)} chunks/s at the client"
    lines = [[process, *(number(values[name]) for name in names)] for process, values in rows.items()]
    print(table(title, ["process", *names], lines))
    for kind, count in sorted(found.errors.items()):
        print(f"errors: {count} x {kind}")
    write_json(
        given.json,
        {
            "arm": given.arm,
            "streams": given.streams,
            "chunks_per_s": found.chunks_per_s,
            "processes": rows,
            "errors": dict(found.errors),
        },
    )


if __name__ == "__main__":
    main()
