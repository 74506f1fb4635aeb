"""What the gateway adds: bare Envoy, Envoy with a trivial processor, Envoy with extproc, in one run.

    python -m loadtest.overhead                      everything, about six minutes
    python -m loadtest.overhead --rounds 2 --seconds 1 --count 50      a quick look

Rules of this file:

- the arms take turns within every round, each round in another order; differences and their intervals are
  taken round by round, so slow weather on the machine meets all arms alike;
- the client, the engine, Envoy and the processor share this machine: saturation is that of the whole, and
  how busy the client and the engine were is printed;
- budgets are judged on the mean over the rounds; an interval that reaches over the budget is called
  ``unsure``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client import Client, Sample, Shot, closed_loop, open_loop
from loadtest.cpu import Meter
from loadtest.log_cost import record_cost_s
from loadtest.processes import StartError, processes, raise_open_files
from loadtest.report import (
    Interval,
    interval,
    number,
    percentile,
    table,
    with_interval,
    write_json,
)
from loadtest.responder import Reply
from loadtest.stage import MODEL, Arm, Stage, build
from loadtest.workload import Ask, block, poisson, size

ARMS = ("bare", "trivial", "extproc")
_CONCURRENCY = 32
_LONG = 10_000
_SHORT = 100
_BOTH = (_LONG, _SHORT)
_CHUNK_US = 0.1
"""What a busier machine (caches, clock) may make of nothing: one message a chunk would be 100 us or more."""


@dataclass(slots=True)
class Series:
    """One number of each arm, a value a round."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def mean(self, arm: str) -> float:
        """Mean over the rounds."""
        return interval(self.values[arm]).mean

    def difference(self, arm: str, base: str) -> Interval:
        """Arm minus base, round by round."""
        return interval([a - b for a, b in zip(self.values[arm], self.values[base], strict=True)])


@dataclass(slots=True)
class Findings:
    """All series of a run by name, for example ``4KB p50_ms``."""

    series: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    errors: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def put(self, name: str, arm: str, value: float) -> None:
        """One round's value."""
        self.series[name].values[arm].append(value)

    def count_errors(self, arm: str, samples: Sequence[Sample]) -> None:
        """Failed requests, by arm and kind."""
        for sample in samples:
            if sample.error:
                self.errors[f"{arm} {sample.error}"] += 1


class Bench:
    """The measurements; one client an arm, kept for the whole run."""

    def __init__(self, stage: Stage, sizes: Sequence[str]) -> None:
        self.stage = stage
        self.found = Findings()
        self._clients = {name: Client(arm.target, timeout_s=60.0) for name, arm in stage.arms.items()}
        self._bodies = {name: _bodies(size(name) or 0) for name in sizes}
        self.order = list(stage.arms.values())

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.close()

    def next_round(self) -> None:
        """Another arm goes first."""
        self.order.append(self.order.pop(0))

    def _requests(self, arm: Arm, name: str, reply: Reply) -> list[bytes]:
        return [arm.target.request(body, reply.header()) for body in self._bodies[name]]

    def _meter(self, arm: Arm) -> Meter:
        return Meter({**arm.pids, "engine": self.stage.engine_pid, "client": os.getpid()})

    async def latency(self, name: str, count: int) -> None:
        """One request at a time."""
        for arm in self.order:
            requests = itertools.cycle([(one, False) for one in self._requests(arm, name, Reply())])
            samples = await closed_loop(self._clients[arm.name], requests, concurrency=1, count=count)
            self.found.count_errors(arm.name, samples)
            times = [one.e2e_s * 1e3 for one in samples if not one.error]
            self.found.put(f"{name} c=1 p50 ms", arm.name, percentile(times, 0.5))
            self.found.put(f"{name} c=1 p99 ms", arm.name, percentile(times, 0.99))

    async def saturation(self, name: str, seconds: float) -> None:
        """As many as the machine bears."""
        for arm in self.order:
            requests = itertools.cycle([(one, False) for one in self._requests(arm, name, Reply())])
            meter = self._meter(arm)
            samples = await closed_loop(
                self._clients[arm.name], requests, concurrency=_CONCURRENCY, duration_s=seconds
            )
            used = meter.lap()
            self.found.count_errors(arm.name, samples)
            good = sum(not one.error for one in samples) or math.nan
            self.found.put(f"{name} saturation rps", arm.name, good / used["client"].wall_s)
            for process in ("processor", "envoy", "engine", "client"):
                cpu = used[process].cpu_s if process in used else math.nan
                self.found.put(f"{name} {process} us/request", arm.name, cpu / good * 1e6)
            for process in ("engine", "client"):
                self.found.put(f"{name} {process} cores", arm.name, used[process].cores)

    async def half_load(self, name: str, rate: float, seconds: float, seed: str) -> None:
        """Independent arrivals at a fixed rate, the same for all arms."""
        for arm in self.order:
            requests = itertools.cycle(self._requests(arm, name, Reply()))
            times = itertools.takewhile(lambda at: at < seconds, poisson(rate, seed))
            shots = (Shot(at, request) for at, request in zip(times, requests, strict=False))
            samples = await open_loop(self._clients[arm.name], shots, drain_s=20.0)
            self.found.count_errors(arm.name, samples)
            good = [one for one in samples if not one.error]
            for share in (50, 99):
                value = percentile([one.e2e_s * 1e3 for one in good], share / 100)
                self.found.put(f"{name} half load p{share} ms", arm.name, value)
            late = percentile([one.late_s * 1e3 for one in samples], 0.99)
            self.found.put(f"{name} half load client late p99 ms", arm.name, late)

    async def replies(self, name: str, rate: float, seconds: float) -> None:
        """Short and long streams at the same rate: what the processor does must not depend on the reply."""
        for arm in self.order:
            if "processor" not in arm.pids:
                continue
            for chunks in _BOTH:
                requests = itertools.cycle(self._requests(arm, name, Reply(chunks)))
                count = max(1, round(rate * seconds))
                picked = zip(range(count), requests, strict=False)
                shots = (Shot(i / rate, request, True) for i, request in picked)
                sent_before = _ext_proc_messages(arm)
                meter = self._meter(arm)
                samples = await open_loop(self._clients[arm.name], shots, drain_s=30.0)
                used = meter.lap()
                self.found.count_errors(arm.name, samples)
                for process in ("processor", "envoy"):
                    cost = used[process].cpu_s / len(samples) * 1e6
                    self.found.put(f"{chunks} chunks {process} us/request", arm.name, cost)
                messages = (_ext_proc_messages(arm) - sent_before) / len(samples)
                self.found.put(f"{chunks} chunks ext_proc messages", arm.name, messages)

    async def log_records(self) -> None:
        """CPU of one access log record."""
        for arm in self.order:
            if arm.processor_socket is None:
                continue
            pid, port = arm.pids["processor"], self.stage.engine_ports[0]
            cost = await record_cost_s(arm.processor_socket, pid, port)
            self.found.put("access log us/record", arm.name, cost * 1e6)


def _bodies(prompt_bytes: int) -> list[bytes]:
    """Sixteen different prompts of that size."""
    made = []
    for number_ in range(16):
        blocks = -(-prompt_bytes // 2048)
        prompt = "".join(block(f"overhead {number_} {place}", "1") for place in range(blocks))[:prompt_bytes]
        made.append(Ask(0.0, prompt, 16).body(MODEL, stream=False))
    return made


def _ext_proc_messages(arm: Arm) -> int:
    """Messages this arm's Envoy has exchanged with its processor."""
    url = f"http://127.0.0.1:{arm.admin_port}/stats?filter=ext_proc.*stream_msgs&format=json"
    with urllib.request.urlopen(url, timeout=5.0) as reply:
        stats = json.load(reply)["stats"]
    return sum(int(one["value"]) for one in stats if "value" in one)


@dataclass(frozen=True, slots=True)
class Options:
    """How much of everything."""

    arms: tuple[str, ...]
    sizes: tuple[str, ...]
    rounds: int
    count: int
    seconds: float


async def measure(stage: Stage, options: Options) -> Findings:
    """All measurements."""
    bench = Bench(stage, options.sizes)
    try:
        for name in options.sizes:  # connections, code paths and learned state, not measured
            for _ in (1, 2):
                await bench.saturation(name, min(1.0, options.seconds))
        bench.found = Findings()
        for turn in range(options.rounds):
            for name in options.sizes:
                await bench.latency(name, options.count)
                await bench.saturation(name, options.seconds)
            await bench.log_records()
            bench.next_round()
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
        slowest = "extproc" if "extproc" in options.arms else options.arms[-1]
        for turn in range(options.rounds):
            for name in options.sizes:
                rate = bench.found.series[f"{name} saturation rps"].mean(slowest) / 2
                await bench.half_load(name, rate, options.seconds * 2, f"half {turn}")
            await bench.replies(options.sizes[0], 10.0, options.seconds * 2)
            bench.next_round()
            print(f"half load and replies {turn + 1} of {options.rounds}", file=sys.stderr)
        return bench.found
    finally:
        await bench.close()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One budget against what was measured."""

    what: str
    budget: float
    measured: Interval
    unit: str

    @property
    def word(self) -> str:
        """``within``, ``over``, or ``unsure`` where the interval holds the budget."""
        if math.isnan(self.measured.mean):
            return "not measured"
        if self.measured.low <= self.budget < self.measured.high:
            return "unsure"
        return "within" if self.measured.mean <= self.budget else "over"


def reading_us(prompt_bytes: int) -> float:
    """What reading a larger prompt may cost on top: extproc's own code has 0.15 ms for 4 KB and 1.5 ms for
    220 KB."""
    return max(0.0, 1350.0 * (prompt_bytes - 4096) / (220 * 1024 - 4096))


def verdicts(found: Findings, sizes: Sequence[str]) -> list[Verdict]:
    """The budgets that this benchmark can judge."""
    rows = []
    for name in sizes:
        series = found.series
        more_us = reading_us(size(name) or 0)
        cpu = series[f"{name} processor us/request"].difference("extproc", "trivial")
        rows.append(
            Verdict(f"{name}: extproc CPU at saturation - trivial", 250.0 + more_us, cpu, "us/request")
        )
        p50 = series[f"{name} c=1 p50 ms"].difference("extproc", "trivial")
        rows.append(Verdict(f"{name}: p50 at concurrency 1 - trivial", 0.3 + more_us / 1e3, p50, "ms"))
        p99 = series[f"{name} half load p99 ms"].difference("extproc", "bare")
        rows.append(Verdict(f"{name}: p99 at half of saturation - bare", 5.0, p99, "ms"))
    long, short = (found.series[f"{chunks} chunks ext_proc messages"].values["extproc"] for chunks in _BOTH)
    more = interval([a - b for a, b in zip(long, short, strict=True)])
    rows.append(Verdict(f"ext_proc messages: {_LONG:,} chunks - {_SHORT}", 0.0, more, "messages"))
    long, short = (
        found.series[f"{chunks} chunks processor us/request"].values["extproc"] for chunks in _BOTH
    )
    each = interval([(a - b) / (_LONG - _SHORT) for a, b in zip(long, short, strict=True)])
    rows.append(
        Verdict(f"extproc CPU for each chunk from {_SHORT} to {_LONG:,}", _CHUNK_US, each, "us/chunk")
    )
    record = interval(found.series["access log us/record"].values["extproc"])
    rows.append(Verdict("access log", 30.0, record, "us/record"))
    return rows


def _print(found: Findings, options: Options) -> None:
    rows = []
    for name, series in found.series.items():
        row = [name, *(number(series.mean(arm)) for arm in options.arms)]
        for arm, base in (("trivial", "bare"), ("extproc", "trivial")):
            if arm in options.arms and base in options.arms:
                both = series.values[arm] and series.values[base]
                row.append(with_interval(series.difference(arm, base)) if both else "-")
        rows.append(row)
    head = ["", *options.arms]
    head += [
        f"{arm} - {base} [95 %]"
        for arm, base in (("trivial", "bare"), ("extproc", "trivial"))
        if arm in options.arms and base in options.arms
    ]
    print(table("", head, rows))
    for what, count in sorted(found.errors.items()):
        print(f"errors: {count} x {what}")
    if set(ARMS) <= set(options.arms):
        judged = [
            [one.what, number(one.budget), with_interval(one.measured), one.unit, one.word]
            for one in verdicts(found, options.sizes)
        ]
        print()
        print(table("", ["budget", "at most", "measured [95 %]", "", ""], judged))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--sizes", nargs="+", default=["4KB", "220KB"], help="default 4KB 220KB")
    parser.add_argument("--rounds", type=int, default=6, help="independent rounds (default 6)")
    parser.add_argument("--count", type=int, default=300, help="requests at concurrency 1 (default 300)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a slice at saturation (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    return parser


def main() -> None:
    """Parse, start everything, measure, print, end everything."""
    parser = _parser()
    given = parser.parse_args()
    if any(size(one) is None for one in given.sizes):
        parser.error("sizes are written like 4KB")
    if min(given.rounds, given.count) < 1 or given.seconds <= 0:
        parser.error("rounds, count and seconds must be above zero")
    options = Options(tuple(given.arms), tuple(given.sizes), given.rounds, given.count, given.seconds)
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="loadtest-") as directory, processes(Path(directory)) as children:
        try:
            stage = build(children, list(options.arms))
        except (StartError, FileNotFoundError) as error:
            sys.exit(str(error))
        found = asyncio.run(measure(stage, options))
    _print(found, options)
    write_json(
        given.json,
        {
            "series": {name: dict(series.values) for name, series in found.series.items()},
            "errors": dict(found.errors),
            "budgets": [
                {"what": one.what, "budget": one.budget, "measured": one.measured, "verdict": one.word}
                for one in (verdicts(found, options.sizes) if set(ARMS) <= set(options.arms) else [])
            ],
        },
    )


if __name__ == "__main__":
    main()
