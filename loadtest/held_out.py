"""The default policy on workloads and engines that played no part in making it.

    python -m loadtest.held_out [--trace FILE]… [--seeds 2]

The grid (loadtest/grid.py) is where the default was mended, so it cannot tell how good the default is elsewhere. Here are
other workloads (loadtest/workloads, and any trace you have), other models on other cards, moderate and heavy load, with the
engines as they are and perturbed. Printed are p90 TTFT over the default's, geometric means over all of that: first for other
policies, then for the default with its hand-set weights changed:

- *stall*: what a second of prefill costs a running stream (``cost.STALL_SHARE``);
- *redundant work*: whether an uncached token also counts for those that wait (``cost.PrefillTerm``), and for how many
  (``cost.DELAYED``).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from extproc.replay.arrival import Arrival
from extproc.replay.comparison import load_trace
from extproc.replay.driver import Driver
from extproc.replay.policies import COMPARED, DEFAULT, parse_policy
from extproc.replay.setup import PERTURBATIONS, Setup, fleet, resolution_of
from extproc.scheduling import cost
from loadtest.capacity import at_once, capacity

FLEETS = (("llama-70b-4xh100", 4), ("qwen-7b-a10", 8))
LOADS = (0.6, 0.95)
REQUESTS = 1000
WORKLOADS = sorted(str(path) for path in (Path(__file__).parent / "workloads").glob("*.yaml"))


def _own_work(self: object, query: object, scene: cost.Scene, now: float) -> list[float]:
    return [units / rate for units, rate in zip(scene.works(query), scene.rates, strict=True)]  # type: ignore[arg-type]


CHANGES = {
    "as it is": {},
    "stall 0": {"STALL_SHARE": 0.0},
    "stall half": {"STALL_SHARE": 0.05},
    "stall double": {"STALL_SHARE": 0.2},
    "redundant work not counted": {"PrefillTerm.seconds": _own_work},
    "counted once": {"DELAYED": 1.0},
    "counted double": {"DELAYED": 8.0},
    "neither": {"STALL_SHARE": 0.0, "PrefillTerm.seconds": _own_work},
}


@dataclass(slots=True, frozen=True)
class Place:
    """One workload on one fleet."""

    source: str
    preset: str
    engines: int
    load: float
    perturbed: bool

    def arrivals(self, seed: int, rate: float) -> list[Arrival]:
        """Requests at ``rate`` a second, whatever the trace's own rate is."""
        found = load_trace(self.source, rate=rate, requests=REQUESTS, seed=seed).arrivals
        factor = (len(found) - 1) / found[-1].at / rate
        return [replace(arrival, at=arrival.at * factor) for arrival in found]

    def setup(self, arrivals: Sequence[Arrival], seed: int, *, perturbed: bool) -> Setup:
        """Engines and what the gateway sees."""
        size = resolution_of(arrivals)
        perturb = frozenset(PERTURBATIONS) if perturbed else frozenset[str]()
        engines = fleet(self.engines, [self.preset], block_size=size, perturb=perturb)
        return Setup(engines, seed=seed, resolution=size)

    def capacity(self) -> float:
        """Requests a second under least-requests when all are there at once."""
        arrivals = at_once(self.arrivals(0, float(self.engines)))
        return capacity(arrivals, self.setup(arrivals, 0, perturbed=False))

    def log_ttft(self, policy: str, seed: int, capacity: float) -> float:
        """Logarithm of p90 TTFT."""
        arrivals = self.arrivals(seed, capacity * self.load)
        setup = self.setup(arrivals, seed, perturbed=self.perturbed)
        summary = Driver(arrivals, setup, parse_policy(policy)).run().summary()
        gc.collect()
        return math.log(float(summary["ttft_p90_s"]))  # type: ignore[arg-type]


@contextmanager
def changed(values: dict[str, object]) -> Iterator[None]:
    """The cost terms with other weights."""
    patches = [patch(f"extproc.scheduling.cost.{name}", value) for name, value in values.items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="The default on workloads that it was not made on.")
    parser.add_argument("--trace", action="append", default=[], help="a further trace file")
    parser.add_argument("--seeds", type=int, default=2)
    wanted = parser.parse_args()
    gc.disable()
    others = [policy for policy in COMPARED if policy != DEFAULT]
    sums: dict[str, list[float]] = {name: [] for name in (*others, *CHANGES)}
    for source, (preset, engines) in itertools.product([*WORKLOADS, *wanted.trace], FLEETS):
        capacity = Place(source, preset, engines, 1.0, perturbed=False).capacity()
        for load, perturbed in itertools.product(LOADS, (False, True)):
            place = Place(source, preset, engines, load, perturbed)
            usual = [place.log_ttft(DEFAULT, seed, capacity) for seed in range(wanted.seeds)]
            row = {}
            for policy in others:
                row[policy] = [place.log_ttft(policy, seed, capacity) for seed in range(wanted.seeds)]
            for name, values in CHANGES.items():
                with changed(dict(values)):
                    row[name] = [place.log_ttft(DEFAULT, seed, capacity) for seed in range(wanted.seeds)]
            for name, found in row.items():
                sums[name].append(sum(a - b for a, b in zip(found, usual, strict=True)) / len(found))
            best = min(others, key=lambda policy: sums[policy][-1])
            print(
                f"{Path(source).name}, {engines} x {preset}, {load:.0%}{', perturbed' * perturbed}: p90 TTFT "
                f"{math.exp(sum(usual) / len(usual)):.3f} s; the best other is {best}, x{math.exp(sums[best][-1]):.2f}",
                flush=True,
            )
    print(f"\np90 TTFT over the default's, geometric mean of {len(sums['random'])} places, and at best:")
    for name, logs in sums.items():
        print(f"  {name:28} x{math.exp(sum(logs) / len(logs)):.3f}   x{math.exp(min(logs)):.2f}")


if __name__ == "__main__":
    main()
