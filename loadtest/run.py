"""Load on a running gateway: open loop, from a trace or Poisson arrivals, measured at the client.

    python -m loadtest.run --url http://127.0.0.1:8080 --model m --workload 4KB --rate 50 --duration 30
    python -m loadtest.run --url http://127.0.0.1:8080 --model m --workload conversation.jsonl --scale 2
    --requests 2000 python -m loadtest.run --compare http://127.0.0.1:8080 http://127.0.0.1:8081 --model m
    --workload 4KB --rate 50

Rules of this file:

- every run is bounded by ``--duration`` and ``--requests``, then by ``--drain`` for replies under way;
- all latencies count from the intended send time; ``late`` says how much of them is the client's own;
- ``--compare`` sends slice by slice to A and B in the order A B, B A, A B …: both get the same arrivals and
  lengths, and their own prompt text, so that gateways before the same engines do not warm each other's
  prefix caches. The ratio's interval comes from the pairs of slices.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from loadtest import workload
from loadtest.client import Client, Sample, Shot, Target, open_loop
from loadtest.cpu import Meter
from loadtest.processes import raise_open_files
from loadtest.report import (
    Histogram,
    Interval,
    number,
    percentile,
    ratio_interval,
    table,
    with_interval,
    write_json,
)


@dataclass(slots=True)
class Result:
    """What one target did, over one or more slices."""

    samples: list[Sample] = field(default_factory=list)
    gaps: Histogram = field(default_factory=Histogram)
    sending_s: float = 0.0
    """Time in which requests were sent and answered."""
    client_cpu_s: float = 0.0

    def add(self, other: Result) -> None:
        """Take over another slice."""
        self.samples += other.samples
        self.gaps.add(other.gaps)
        self.sending_s += other.sending_s
        self.client_cpu_s += other.client_cpu_s

    @property
    def good(self) -> list[Sample]:
        """Complete replies."""
        return [sample for sample in self.samples if not sample.error]

    @property
    def errors(self) -> dict[str, int]:
        """Number of failed requests by kind."""
        return dict(Counter(sample.error for sample in self.samples if sample.error))

    def numbers(self) -> dict[str, float]:
        """Latencies in milliseconds and rates; latencies of complete replies only."""
        good = self.good
        found: dict[str, float] = {
            "requests": float(len(self.samples)),
            "errors": float(len(self.samples) - len(good)),
            "per_s": len(good) / self.sending_s if self.sending_s else 0.0,
        }
        rows: dict[str, list[float]] = {
            "ttft": [one.ttft_s for one in good if one.first_s],
            "tpot": [one.tpot_s for one in good if one.tpot_s],
            "e2e": [one.e2e_s for one in good],
        }
        for name, values in rows.items():
            for share in (50, 90, 99):
                found[f"{name}_p{share}_ms"] = percentile(values, share / 100) * 1e3
            found[f"{name}_mean_ms"] = sum(values) / len(values) * 1e3 if values else float("nan")
        for share in (50, 99):
            found[f"itl_p{share}_ms"] = self.gaps.percentile(share / 100) * 1e3
        found["late_p99_ms"] = percentile([one.late_s for one in self.samples if one.sent_s], 0.99) * 1e3
        count = len(self.samples)
        found["client_cpu_us"] = self.client_cpu_s / count * 1e6 if count else float("nan")
        return found


def shots(
    asks: Iterator[workload.Ask], target: Target, model: str, *, stream: bool, until_s: float, requests: int
) -> Iterator[Shot]:
    """The requests of a workload for one target, until a time or a number is reached."""
    for _ in range(requests):
        ask = next(asks, None)
        if ask is None or ask.at_s > until_s:
            return
        yield Shot(ask.at_s, target.request(ask.body(model, stream=stream)), stream)


async def measure(target: Target, planned: Iterator[Shot], *, drain_s: float, max_open: int) -> Result:
    """Send these requests and take what came back."""
    client = Client(target, max_open=max_open)
    meter = Meter({"client": os.getpid()})
    start = client.loop.time()
    try:
        samples = await open_loop(client, planned, drain_s=drain_s)
        took = client.loop.time() - start
    finally:
        await client.close()
    return Result(samples, client.gaps, took, meter.lap()["client"].cpu_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line asks for."""

    make: Callable[[str, str], Iterator[workload.Ask]]
    model: str
    stream: bool
    duration_s: float
    requests: int
    slice_s: float
    drain_s: float
    max_open: int
    seed: str


async def run_one(plan: Plan, target: Target) -> Result:
    """The whole workload against one target."""
    planned = shots(
        plan.make(plan.seed, plan.seed),
        target,
        plan.model,
        stream=plan.stream,
        until_s=plan.duration_s,
        requests=plan.requests,
    )
    return await measure(target, planned, drain_s=plan.drain_s, max_open=plan.max_open)


async def compare(plan: Plan, first: Target, second: Target) -> list[tuple[Result, Result]]:
    """Pairs of slices, each of the same arrivals for both targets."""
    sources = [_slices(plan.make(plan.seed, f"{plan.seed} {arm}"), plan.slice_s) for arm in ("a", "b")]
    pairs: list[tuple[Result, Result]] = []
    sent = 0
    for turn in range(max(1, round(plan.duration_s / plan.slice_s))):
        asks = [next(source, []) for source in sources]
        asks = [some[: plan.requests - sent] for some in asks]
        if not asks[0]:
            break
        sent += len(asks[0])
        results: dict[int, Result] = {}
        for arm in (0, 1) if turn % 2 == 0 else (1, 0):
            target = (first, second)[arm]
            planned = shots(
                iter(asks[arm]),
                target,
                plan.model,
                stream=plan.stream,
                until_s=float("inf"),
                requests=len(asks[arm]),
            )
            results[arm] = await measure(target, planned, drain_s=plan.drain_s, max_open=plan.max_open)
        pairs.append((results[0], results[1]))
        print(f"pair {turn + 1}: {len(asks[0])} requests each", file=sys.stderr)
    return pairs


def _slices(asks: Iterator[workload.Ask], slice_s: float) -> Iterator[list[workload.Ask]]:
    """The workload cut by time; the times of each piece begin at its own start."""
    piece: list[workload.Ask] = []
    start = 0.0
    for ask in asks:
        while ask.at_s >= start + slice_s:
            yield piece
            piece = []
            start += slice_s
        piece.append(replace(ask, at_s=ask.at_s - start))
    yield piece


def ratios(pairs: list[tuple[Result, Result]]) -> dict[str, Interval]:
    """B over A for each number, with the interval over the pairs."""
    numbers = [(a.numbers(), b.numbers()) for a, b in pairs]
    names = (
        [name for name in numbers[0][0] if name.endswith("_ms") and not name.startswith("late")]
        if numbers
        else []
    )
    return {name: ratio_interval((a[name], b[name]) for a, b in numbers) for name in names}


def _print(results: dict[str, Result], found: dict[str, Interval]) -> None:
    columns = {name: result.numbers() for name, result in results.items()}
    rows = []
    for name in next(iter(columns.values())):
        row = [name, *(number(column[name]) for column in columns.values())]
        if found:
            row.append(with_interval(found[name], 3) if name in found else "")
        rows.append(row)
    print(table("", ["", *columns, *(["B / A [95 %]"] if found else [])], rows))
    for name, result in results.items():
        for error, count in sorted(result.errors.items()):
            print(f"{name}: {count} x {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="gateway; without a path /v1/chat/completions is meant")
    where.add_argument("--compare", nargs=2, metavar=("URL_A", "URL_B"), help="two gateways, slice by slice")
    parser.add_argument(
        "--workload", required=True, help="prompt size (4KB, 220KB) or trace file (.jsonl, .csv)"
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (sizes; default 10)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="speed of a trace (2: twice as fast; default 1)"
    )
    parser.add_argument("--output-tokens", type=int, default=64, help="reply length (sizes; default 64)")
    parser.add_argument("--prompts", type=int, default=64, help="different prompts (sizes; default 64)")
    parser.add_argument("--no-stream", action="store_true", help="ask for whole replies instead of streams")
    parser.add_argument(
        "--duration", type=float, default=30.0, help="seconds of sending to each target (default 30)"
    )
    parser.add_argument(
        "--requests", type=int, default=100_000, help="at most this many to each (default 100,000)"
    )
    parser.add_argument(
        "--slice", type=float, default=5.0, help="seconds of one slice of --compare (default 5)"
    )
    parser.add_argument(
        "--drain", type=float, default=60.0, help="seconds to wait for the last replies (default 60)"
    )
    parser.add_argument("--max-open", type=int, default=10_000, help="connections at once (default 10,000)")
    parser.add_argument("--seed", default="1", help="other seed, other arrivals and prompts (default 1)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers there")
    return parser


def main() -> None:
    """Parse, run, print."""
    parser = _parser()
    given = parser.parse_args()
    if (
        min(given.rate, given.scale, given.duration, given.slice) <= 0
        or min(given.requests, given.prompts) < 1
    ):
        parser.error("rate, scale, duration, slice, requests and prompts must be above zero")
    try:
        targets = [Target.of(url) for url in given.compare or [given.url]]
        make = workload.named(
            given.workload,
            rate=given.rate,
            scale=given.scale,
            output_tokens=given.output_tokens,
            prompts=given.prompts,
        )
    except (ValueError, workload.WorkloadError) as error:
        parser.error(str(error))
    plan = Plan(
        make,
        given.model,
        not given.no_stream,
        given.duration,
        given.requests,
        given.slice,
        given.drain,
        given.max_open,
        given.seed,
    )
    raise_open_files()
    found: dict[str, Interval] = {}
    try:
        if given.compare:
            pairs = asyncio.run(compare(plan, *targets))
            results = {"A": Result(), "B": Result()}
            for a, b in pairs:
                results["A"].add(a)
                results["B"].add(b)
            found = ratios(pairs)
        else:
            results = {targets[0].host: asyncio.run(run_one(plan, targets[0]))}
    except workload.WorkloadError as error:
        sys.exit(str(error))
    _print(results, found)
    write_json(
        given.json,
        {
            "targets": {
                name: {**one.numbers(), "errors_by_kind": one.errors} for name, one in results.items()
            },
            "ratios": found,
        },
    )


if __name__ == "__main__":
    main()
