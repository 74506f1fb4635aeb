"""Every policy over a grid of workloads, fleets, loads and troubles; docs/policies.md is made from its results.

    python -m loadtest.grid --out grid.json [--trace conversation_trace.jsonl] [--seeds 3] [--policy NAME]… [--cell PART]…
    python -m loadtest.policies_page grid.json docs

Rules of this file:

- the load of a cell is a share of its capacity: the throughput of the same engines under least-requests when all
  requests are there at once;
- a policy is told of nothing: neither the engines' speed nor what disturbs them. All begin with empty caches and priors;
- results are written after every cell, and a cell whose results are there is not run again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from extproc.replay.arrival import Arrival
from extproc.replay.comparison import load_trace
from extproc.replay.driver import Driver
from extproc.replay.faults import Fault
from extproc.replay.policies import COMPARED, parse_policy
from extproc.replay.result import Run
from extproc.replay.setup import PERTURBATIONS, Setup, Slo, fleet, resolution_of
from extproc.replay.waiting import parse_admission
from extproc.replay.workload import builtin_names
from loadtest.capacity import at_once, capacity

PRESET = "llama-8b-h100"
SLOWER = "llama-8b-a100"
KV = {"ample": 1_000_000, "starved": 160_000}
LOADS = (0.3, 0.7, 0.95)
FLEETS = (2, 32, 128)
TROUBLES = ("lag", "mixed", "slow node", "dead node", "stalls", "perturbed")
OVERLOAD = 1.2
WAITING = "interactive:max_wait_s=2:max_ttft_s=1"
"""Admission beyond capacity: what cannot begin within two seconds is refused."""
REQUESTS = {2: 800, 8: 1500, 32: 3000, 128: 5000}
MOST_SEEDS = {128: 2}
"""Engines -> seeds, where a run takes a minute."""
Rows = dict[str, list[dict[str, object]]]
"""Policy -> its runs' summaries, by seed."""


@dataclass(slots=True, frozen=True)
class Cell:
    """One place of the grid."""

    workload: str
    engines: int = 8
    kv: str = "ample"
    load: float = 0.7
    trouble: str = ""

    @property
    def name(self) -> str:
        """A word for tables."""
        words = [self.workload, f"{self.engines} engines", f"{self.load:.0%}"]
        return ", ".join(
            [*words, *(["starved KV"] if self.kv == "starved" else []), *filter(None, [self.trouble])]
        )


def cells(workloads: Sequence[str]) -> Iterator[Cell]:
    """The whole grid."""
    for workload in workloads:
        for kv, load in itertools.product(KV, LOADS):
            yield Cell(workload, kv=kv, load=load)
        for engines in FLEETS:
            yield Cell(workload, engines=engines)
        for trouble in TROUBLES:
            yield Cell(workload, trouble=trouble)
        yield Cell(workload, load=OVERLOAD)


def setup_of(cell: Cell, arrivals: Sequence[Arrival], seed: int) -> Setup:
    """The stage of a cell."""
    size = resolution_of(arrivals)
    span = arrivals[-1].at
    presets = [PRESET, SLOWER] if cell.trouble == "mixed" else [PRESET]
    perturb = frozenset(PERTURBATIONS) if cell.trouble == "perturbed" else frozenset[str]()
    engines = fleet(cell.engines, presets, block_size=size, kv_tokens=KV[cell.kv], perturb=perturb)
    setup = Setup(engines, seed=seed, resolution=size, slo=Slo(2.0, 0.1))
    if cell.trouble == "lag":
        return replace(setup, scrape_interval_s=5.0, scrape_lag_s=5.0)
    if cell.trouble == "slow node":
        return replace(setup, faults=(Fault("slow", 0, 4.0, span * 0.25, span * 0.5),))
    if cell.trouble == "stalls":
        return replace(setup, faults=tuple(stalls(cell.engines, span, seed)))
    if cell.trouble == "dead node":
        return replace(setup, faults=(Fault("down", 0, at_s=span * 0.25, for_s=span * 0.5),))
    if cell.load > 1.0:
        return replace(setup, admission=parse_admission(WAITING))
    return setup


def stalls(engines: int, span: float, seed: int) -> Iterator[Fault]:
    """Each engine hangs for three seconds twice, whenever it may be."""
    rng = random.Random(f"stalls {seed}")
    for engine in range(engines):
        for _ in range(2):
            yield Fault("stall", engine, at_s=rng.uniform(0.0, span), for_s=3.0)


class Source:
    """Arrivals by workload: generated ones, and the trace file under the name ``conversation``."""

    def __init__(self, trace: Path | None) -> None:
        self._trace = trace

    def arrivals(self, cell: Cell, seed: int, rate: float) -> list[Arrival]:
        """The cell's requests at ``rate`` a second; seeds take different parts of a trace."""
        count = REQUESTS[cell.engines]
        if cell.workload != "conversation":
            return list(load_trace(cell.workload, rate=rate, requests=count, seed=seed).arrivals)
        whole = self._whole()
        first = seed * 3001 % max(len(whole) - count, 1)
        part = whole[first : first + count]
        factor = (len(part) - 1) / (part[-1].at - part[0].at) / rate
        start = part[0].at
        return [replace(arrival, at=(arrival.at - start) * factor) for arrival in part]

    @cache  # noqa: B019 - one object lives as long as the program
    def _whole(self) -> list[Arrival]:
        if self._trace is None:
            raise SystemExit("the conversation workload needs --trace")
        return list(load_trace(str(self._trace)).arrivals)

    @cache  # noqa: B019
    def capacity(self, cell: Cell) -> float:
        """Requests a second that the cell's engines can do under least-requests; fleets above 8 by proportion."""
        fewer = replace(cell, engines=min(cell.engines, 8))
        arrivals = at_once(self.arrivals(fewer, 0, float(fewer.engines))[:1000])
        return capacity(arrivals, setup_of(fewer, arrivals, 0)) * cell.engines / fewer.engines

    def run(self, cell: Cell, policy: str, seed: int) -> Run:
        """One run. Trouble strikes engines that are loaded as if there were none, but for slower ones."""
        usual = replace(cell, load=0.7, trouble="mixed" if cell.trouble == "mixed" else "")
        arrivals = self.arrivals(cell, seed, self.capacity(usual) * cell.load)
        return Driver(arrivals, setup_of(cell, arrivals, seed), parse_policy(policy)).run()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description="Policies over the grid.")
    parser.add_argument("--trace", type=Path, help="block-hash trace for the conversation workload")
    parser.add_argument("--out", type=Path, help="results; cells that are there are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", action="append", help="default: all")
    parser.add_argument("--cell", action="append", help="only cells whose name has all words of this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--quiet", action="store_true")
    wanted = parser.parse_args()
    names = [*(["conversation"] if wanted.trace else []), *builtin_names()]
    policies = wanted.policy or list(COMPARED)
    done: dict[str, Rows] = {}
    if wanted.out and wanted.out.exists():
        done = json.loads(wanted.out.read_text())["cells"]
    began = time.monotonic()
    chosen = [
        cell
        for cell in cells(names)
        if not wanted.cell or any(all(word in cell.name for word in part.split()) for part in wanted.cell)
    ]
    with ProcessPoolExecutor(wanted.jobs) as workers:
        tasks = {
            workers.submit(rows_of, cell, done.get(cell.name, {}), policies, wanted.seeds, wanted.trace): cell
            for cell in chosen
        }
        for task in as_completed(tasks):
            cell = tasks[task]
            done[cell.name] = task.result()
            if not wanted.quiet:
                print_cell(cell, done[cell.name], time.monotonic() - began)
            if wanted.out:
                order = [one.name for one in cells(names)]
                kept = {name: done[name] for name in sorted(done, key=order.index)}
                wanted.out.write_text(json.dumps({"seeds": wanted.seeds, "cells": kept}, indent=0))
    print_verdict(done, policies)


def rows_of(cell: Cell, have: Rows, policies: Sequence[str], seeds: int, trace: Path | None) -> Rows:
    """A cell's results, those that are there kept."""
    source = _source(trace)
    rows = {policy: list(runs) for policy, runs in have.items()}
    gc.disable()  # a run makes no cycles worth looking for
    for policy in policies:
        runs = rows.setdefault(policy, [])
        for seed in range(len(runs), min(seeds, MOST_SEEDS.get(cell.engines, seeds))):
            runs.append(replace_trace(source.run(cell, policy, seed), cell))
            gc.collect()
    gc.enable()
    return rows


@cache
def _source(trace: Path | None) -> Source:
    """One a process: it remembers capacities."""
    return Source(trace)


def replace_trace(run: Run, cell: Cell) -> dict[str, object]:
    """A run's summary, named after its cell."""
    summary = run.summary() | {"trace": cell.workload}
    del summary["requests_per_engine"]
    return summary


def mean(rows: Sequence[dict[str, object]], key: str) -> float:
    """Over the seeds."""
    values = [float(row[key]) for row in rows if row[key] is not None]  # type: ignore[arg-type]
    return sum(values) / len(values) if values else float("nan")


def print_cell(cell: Cell, rows: Rows, seconds: float) -> None:
    """Each policy's p90 TTFT and hit ratio, best first."""
    order = sorted((mean(runs, "ttft_p90_s"), name) for name, runs in rows.items() if runs)
    words = [f"{name} {value:.3f} ({mean(rows[name], 'hit_ratio'):.0%})" for value, name in order]
    print(f"[{seconds:5.0f} s] {cell.name}: {' · '.join(words)}", flush=True)


def print_verdict(done: dict[str, Rows], policies: Sequence[str]) -> None:
    """Geometric mean of p90 TTFT over the best of each cell."""
    logs: dict[str, list[float]] = {policy: [] for policy in policies}
    for rows in done.values():
        values = {policy: mean(rows[policy], "ttft_p90_s") for policy in policies if rows.get(policy)}
        best = min(values.values(), default=1.0)
        for policy, value in values.items():
            logs[policy].append(math.log(value / best))
    for value, policy, worst, near in sorted(
        (math.exp(sum(log) / len(log)), policy, math.exp(max(log)), sum(x <= math.log(1.03) for x in log))
        for policy, log in logs.items()
        if log
    ):
        print(
            f"{policy:24} x{value:.3f} of the best in the mean, x{worst:.2f} at worst, "
            f"within 3 % in {near} of {len(logs[policy])}"
        )


if __name__ == "__main__":
    main()
