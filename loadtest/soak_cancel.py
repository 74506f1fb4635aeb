"""Cancelled streams must not leak: cancels ext_proc streams by the hundred thousand and watches the
processor's memory.

    python -m loadtest.soak_cancel                        200,000 streams against an extproc of its own
    python -m loadtest.soak_cancel --arm trivial          the same against the trivial processor: grpc alone
    python -m loadtest.soak_cancel --socket live/extproc.sock --pid 123       against one that runs

Rules of this file:

- streams are cancelled in turn at each place where a client can leave: after the headers, with the body
  under way, after the answer was read but before the stream ended;
- for every request the access log record follows that Envoy would send (client gone), so that nothing is
  open for want of an ending;
- memory is judged on the second half: there, growth must be below a bound a stream. The first half may grow:
  allocators and caches fill.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import grpc

from loadtest.cpu import cpu_seconds, rss_bytes
from loadtest.processes import StartError, processes
from loadtest.processor_client import (
    RECORDS_A_MESSAGE,
    ProcessorClient,
    body,
    end_record,
    headers,
    messages,
    prompt,
)
from loadtest.report import number, table, write_json
from loadtest.stage import build, start_extproc, start_trivial

_PLATEAU_BYTES = 256.0
"""Growth per stream, over the second half, below which memory counts as a plateau. grpc.aio by itself keeps
about 100 bytes a cancelled stream (``--arm trivial``); a task, a lease or a call that is left behind is a
kilobyte and more."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory and CPU of the processor after so many streams."""

    streams: int
    rss_bytes: int
    cpu_s: float
    at_s: float


class Soak:
    """A fixed number of workers that open and cancel streams until enough were."""

    def __init__(self, client: ProcessorClient, port: int, total: int) -> None:
        self.done = 0
        self.unexpected = 0
        """Streams that ended otherwise than by our cancelling or a clean end."""
        self._client = client
        self._port = port
        self._total = total
        self._started = 0
        self._content = prompt(2048)
        self._ended: list[str] = []
        self._log = client.open_log()
        self._first_message = True
        self._logging = asyncio.Lock()

    async def worker(self) -> None:
        """One stream after another."""
        while self._started < self._total:
            number_of = self._started
            self._started += 1
            request_id = str(uuid.uuid4())
            try:
                await self._one(request_id, number_of % 3)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self.unexpected += 1
            self.done += 1
            await self._record(request_id)

    async def _one(self, request_id: str, place: int) -> None:
        call = self._client.open()
        try:
            await call.write(headers(request_id, len(self._content)))
            if place == 0:
                return
            await call.read()
            await call.write(body(self._content))
            if place == 1:
                return
            await call.read()
        finally:
            call.cancel()

    async def _record(self, request_id: str) -> None:
        self._ended.append(request_id)
        if len(self._ended) >= RECORDS_A_MESSAGE:
            await self.flush()

    async def flush(self) -> None:
        """Send the records that are due."""
        async with self._logging:
            due, self._ended = self._ended, []
            for message in messages([end_record(one, "engine-0", self._port, left=True) for one in due]):
                if not self._first_message:
                    message.ClearField("identifier")
                self._first_message = False
                await self._log.write(message)

    async def finish(self) -> None:
        """Send the last records and end the log stream."""
        await self.flush()
        await self._log.done_writing()
        await self._log


async def soak(
    socket_path: Path, pid: int, port: int, *, total: int, every: int, workers: int
) -> tuple[list[Reading], int]:
    """Run; returns the readings, the first before any stream and the last after a rest, and the unexpected
    ends."""
    client = ProcessorClient(socket_path)
    try:
        run = Soak(client, port, total)
        readings: list[Reading] = []

        def read() -> None:
            one = Reading(run.done, rss_bytes(pid), cpu_seconds(pid), time.monotonic())
            readings.append(one)
            print(f"{one.streams:>9,} streams  {one.rss_bytes / 2**20:8.1f} MiB", file=sys.stderr, flush=True)

        read()
        running = [asyncio.create_task(run.worker()) for _ in range(workers)]
        try:
            next_reading = every
            while any(not task.done() for task in running):
                await asyncio.wait(running, timeout=0.2, return_when=asyncio.ALL_COMPLETED)
                if run.done >= next_reading and run.done < total:
                    read()
                    next_reading += every
            await asyncio.gather(*running)
            await run.finish()
        finally:
            for task in running:
                task.cancel()
        await asyncio.sleep(3.0)
        read()
        return readings, run.unexpected
    finally:
        await client.close()


def growth_per_stream(readings: list[Reading]) -> float:
    """Bytes per stream over the second half of the streams."""
    last = readings[-1]
    middle = min(readings, key=lambda one: abs(one.streams - last.streams / 2))
    return (last.rss_bytes - middle.rss_bytes) / max(1, last.streams - middle.streams)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.soak_cancel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arm", choices=("extproc", "trivial"), default="extproc", help="what to start")
    parser.add_argument(
        "--socket", type=Path, help="Unix socket of a running processor, instead of starting one"
    )
    parser.add_argument("--pid", type=int, help="its process id")
    parser.add_argument("--total", type=int, default=200_000, help="streams (default 200,000)")
    parser.add_argument("--every", type=int, default=20_000, help="streams between readings (default 20,000)")
    parser.add_argument("--workers", type=int, default=64, help="streams at once (default 64)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    return parser


def main() -> None:
    """Parse, start a processor unless one is given, soak, print; exit code 1 if memory still grows."""
    parser = _parser()
    given = parser.parse_args()
    if (given.socket is None) != (given.pid is None):
        parser.error("--socket and --pid go together")
    if min(given.total, given.every, given.workers) < 1:
        parser.error("total, every and workers must be above zero")
    with tempfile.TemporaryDirectory(prefix="loadtest-") as directory, processes(Path(directory)) as children:
        try:
            if given.socket is not None:
                socket_path, pid, port = given.socket, given.pid, 1
            else:
                stage = build(children, [])
                port = stage.engine_ports[0]
                socket_path = Path(directory) / "live" / "extproc.sock"
                if given.arm == "trivial":
                    pid = start_trivial(children, socket_path, port)
                else:
                    pid = start_extproc(children, Path(directory), stage.engine_ports, 0, socket_path)
        except StartError as error:
            sys.exit(str(error))
        readings, unexpected = asyncio.run(
            soak(socket_path, pid, port, total=given.total, every=given.every, workers=given.workers)
        )
    growth = growth_per_stream(readings)
    first, last = readings[0], readings[-1]
    rows = [[f"{one.streams:,}", number(one.rss_bytes / 2**20, 1)] for one in readings]
    print(table("", ["streams", "RSS MiB"], rows))
    cost = (last.cpu_s - first.cpu_s) / last.streams * 1e6
    print(f"CPU {cost:.0f} us a stream; {unexpected} streams ended otherwise than expected")
    word = "plateau" if growth < _PLATEAU_BYTES else "STILL GROWING"
    print(f"second half: {growth:.1f} bytes a stream: {word}")
    write_json(
        given.json,
        {
            "readings": [
                {"streams": one.streams, "rss_bytes": one.rss_bytes, "cpu_s": one.cpu_s} for one in readings
            ],
            "unexpected": unexpected,
            "bytes_per_stream_second_half": growth,
        },
    )
    sys.exit(0 if growth < _PLATEAU_BYTES else 1)


if __name__ == "__main__":
    main()
