"""How often does a release roll a good version back, and how often does it let a bad one through? In virtual time.

    python -m loadtest.canary                 2,000 seeded runs a case (minutes on two cores)
    python -m loadtest.canary --runs 200

Each run is the whole plan ``5 % 5 m, 25 % 10 m, 50 % 30 m, 100 %`` with the real state machine, second by second. Requests
come as a Poisson process; the load goes up and down by half over the run, and TTFT with it (so that comparing different
times would mislead); errors are independent; TTFT is log-normal with sigma 0.6, which puts its p99 at four times its median.
A bad version is missed when it reaches 100 %. The bounds are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from extproc.release.plan import Guards, Plan, Step
from extproc.release.rollout import Rollout, State

STEPS = (Step(0.05, 300), Step(0.25, 600), Step(0.5, 1800), Step(1.0))
LONGEST_S = 4 * 3600


@dataclass(slots=True, frozen=True)
class Case:
    """A candidate. ``bad``: it must not get through."""

    name: str
    errors: float
    slower: float
    bad: bool


@dataclass(slots=True, frozen=True)
class Load:
    """Requests per second of the pool, and the baseline's error rate."""

    rps: float = 20.0
    errors: float = 0.005
    ttft_s: float = 0.3
    sigma: float = 0.6


def cases(load: Load) -> tuple[Case, ...]:
    """Equal quality, errors, slowness."""
    return (
        Case("equal quality", load.errors, 1.0, bad=False),
        Case("3 % errors", 0.03, 1.0, bad=True),
        Case("1.5x slower", load.errors, 1.5, bad=True),
    )


@dataclass(slots=True, frozen=True)
class Run:
    """How one release went. Seconds until it ended, requests that the candidate got."""

    rolled_back: bool
    guard: str
    seconds: int
    exposed: int


def run(case: Case, load: Load, guards: Guards, seed: int) -> Run:
    """One release from its first step to its end."""
    rng = random.Random(seed)
    rollout = Rollout(Plan("pool", "v1", "v2", STEPS, guards))
    rollout.tick(0.0, available=True)
    phase = rng.random() * 2 * math.pi
    exposed = 0
    for second in range(1, LONGEST_S):
        wave = 1.0 + 0.5 * math.sin(phase + 2 * math.pi * second / 1800)
        share = rollout.share
        for _ in range(_poisson(rng, load.rps * wave)):
            candidate = rng.random() < share
            exposed += candidate
            failed = rng.random() < (case.errors if candidate else load.errors)
            ttft = load.ttft_s * wave * math.exp(load.sigma * rng.gauss(0.0, 1.0))
            slow = case.slower if candidate else 1.0
            rollout.watch.request(candidate=candidate, failed=failed, ttft_s=None if failed else ttft * slow)
        event = rollout.tick(float(second), available=True)
        if event is not None and rollout.state in (State.COMPLETE, State.ROLLED_BACK):
            return Run(rollout.state is State.ROLLED_BACK, rollout.reason.split(":")[0], second, exposed)
    raise RuntimeError("the release did not end")


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's method; the means here are small."""
    count, product, limit = 0, rng.random(), math.exp(-mean)
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def wilson(hits: int, runs: int, z: float = 1.96) -> tuple[float, float]:
    """Bounds of a rate: Wilson, Journal of the American Statistical Association 22 (1927)."""
    rate, spread = hits / runs, z * z / runs
    middle = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / runs + spread / (4 * runs))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def row(case: Case, runs: list[Run]) -> str:
    """One line of the table."""
    wrong = sum(one.rolled_back != case.bad for one in runs)
    low, high = wilson(wrong, len(runs))
    ended = sorted((one.seconds, one.exposed) for one in runs if one.rolled_back)
    middle = ended[len(ended) // 2] if ended else None
    when = f"after {middle[0] / 60:.1f} min, {middle[1]} requests (median)" if middle else "-"
    what = "missed" if case.bad else "false rollbacks"
    return (
        f"| {case.name} | {what}: {wrong} of {len(runs)} | {wrong / len(runs):.2%} | {low:.2%} to {high:.2%} "
        f"| {when} |"
    )


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--runs", type=int, default=2000)
    options.add_argument("--rps", type=float, default=Load().rps)
    options.add_argument("--baseline-errors", type=float, default=Load().errors)
    options.add_argument("--processes", type=int, default=2)
    chosen = options.parse_args()
    load, guards = Load(chosen.rps, chosen.baseline_errors), Guards()
    print(f"{load.rps:g} requests/s, baseline error rate {load.errors:.2%}; guards {guards}\n")
    print("| candidate | wrong | rate | 95 % bounds | rolled back |\n|---|---|---|---|---|")
    with ProcessPoolExecutor(chosen.processes) as pool:
        for number, case in enumerate(cases(load)):
            seeds = range(number * 1_000_000, number * 1_000_000 + chosen.runs)
            runs = list(pool.map(partial(run, case, load, guards), seeds, chunksize=10))
            print(row(case, runs), flush=True)


if __name__ == "__main__":
    main()
