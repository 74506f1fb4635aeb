"""How many requests a second of CPU the simulated engine does, without any routing around it.

    python loadtest/simulator_speed.py [--requests N] [--engines N]

Each case feeds Poisson arrivals round-robin to the engines in virtual time. "requests/s" is simulated
requests per second of CPU time.
"""

from __future__ import annotations

import argparse
import heapq
import time
from dataclasses import dataclass, replace
from random import Random

from extproc.simulator.engine import Engine
from extproc.simulator.job import Job
from extproc.simulator.presets import PRESETS
from extproc.simulator.profile import Profile


@dataclass(frozen=True)
class Case:
    """One workload: prompts share a prefix of ``shared`` of their ``blocks`` blocks with a family."""

    name: str
    profile: Profile
    rate_per_engine: float
    blocks: int
    shared: int
    output: int


H100 = PRESETS["llama-8b-h100"]
STARVED = replace(PRESETS["demo"], kv_blocks=1024)
CASES = (
    Case("small prompts, light load", H100, 4.0, 16, 8, 64),
    Case("small prompts, busy", H100, 24.0, 16, 8, 200),
    Case("12k-token prompts, 16-token blocks", H100, 1.0, 750, 375, 340),
    Case("overload: queue and preemptions", STARVED, 20.0, 16, 8, 300),
)


def run(case: Case, requests: int, engines: int) -> tuple[float, int]:
    """CPU seconds for ``requests`` requests, and the preemptions met."""
    rng = Random(1)
    fleet = [Engine(case.profile, Random(n)) for n in range(engines)]
    rate = case.rate_per_engine * engines
    due: list[tuple[float, int]] = []
    at = 0.0
    began = time.process_time()
    for number in range(requests):
        at += rng.expovariate(rate)
        while due and due[0][0] <= at:
            _advance(fleet, due)
        family = rng.randrange(50) * 1_000_000
        own = 1_000_000_000 + number * 10_000
        hashes = [*range(family, family + case.shared), *range(own, own + case.blocks - case.shared)]
        index = number % engines
        fleet[index].submit(Job(str(number), hashes, case.blocks * case.profile.block_size, case.output), at)
        heapq.heappush(due, (fleet[index].next_event() or at, index))
    while due:
        _advance(fleet, due)
    finished = sum(engine.counters.finished for engine in fleet)
    if finished != requests:
        raise RuntimeError(f"{finished} of {requests} requests finished")
    return time.process_time() - began, sum(engine.counters.preemptions for engine in fleet)


def _advance(fleet: list[Engine], due: list[tuple[float, int]]) -> None:
    """Advance the engine whose turn it is; an entry that a later arrival has made stale only re-schedules."""
    at, index = heapq.heappop(due)
    engine = fleet[index]
    engine.advance(at)
    following = engine.next_event()
    if following is not None and not any(entry[1] == index for entry in due):
        heapq.heappush(due, (following, index))


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--engines", type=int, default=8)
    args = parser.parse_args()
    for case in CASES:
        seconds, preemptions = run(case, args.requests, args.engines)
        per_second = args.requests / seconds
        print(f"{case.name:38} {per_second:9.0f} requests/s  {seconds:6.2f} s CPU  {preemptions} preemptions")


if __name__ == "__main__":
    main()
