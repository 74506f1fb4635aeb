"""Every strategy by its name in the configuration. A new one is a file in ``strategies/`` and a line here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from extproc.scheduling.cost import STREAM_WEIGHT
from extproc.scheduling.options import Options
from extproc.scheduling.strategies.adaptive import Adaptive
from extproc.scheduling.strategies.consistent_hash import ConsistentHash
from extproc.scheduling.strategies.expected_latency import ExpectedLatency
from extproc.scheduling.strategies.latency import Latency
from extproc.scheduling.strategies.least_requests import LeastRequests
from extproc.scheduling.strategies.locality import Locality
from extproc.scheduling.strategies.power_of_two_choices import PowerOfTwoChoices
from extproc.scheduling.strategies.queue_depth import QueueDepth
from extproc.scheduling.strategies.random_choice import RandomChoice
from extproc.scheduling.strategies.round_robin import RoundRobin
from extproc.scheduling.strategies.throughput import Throughput
from extproc.scheduling.strategies.weighted_round_robin import WeightedRoundRobin
from extproc.scheduling.strategies.weighted_score import WeightedScore
from extproc.scheduling.strategies.weighted_split import WeightedSplit
from extproc.scheduling.strategy import Strategy


def _expected_latency(options: Options, rng: random.Random) -> Strategy:
    return ExpectedLatency(
        tie_s=options.number("tie_ms", 1.0, high=1000.0) / 1000.0,
        adapter_load_s=options.number("adapter_load_s", 0.5, high=600.0),
        stream_weight=options.number("stream_weight", STREAM_WEIGHT, high=10.0),
    )


def _consistent_hash(options: Options, rng: random.Random) -> Strategy:
    return ConsistentHash(options.number("bound", 1.25, low=1.0))


def _locality(options: Options, rng: random.Random) -> Strategy:
    return Locality(options.word("prefer", ""), options.number("spill", 8.0))


def _weighted_score(options: Options, rng: random.Random) -> Strategy:
    return WeightedScore(options.weights("weights"))


def _weighted_split(options: Options, rng: random.Random) -> Strategy:
    within = options.word("within", "least-requests")
    if within == "weighted-split":
        raise ValueError("strategy weighted-split cannot be within itself")
    return WeightedSplit(options.weights("weights"), build(within, options.table("within_options"), rng), rng)


_BUILDERS: dict[str, Callable[[Options, random.Random], Strategy]] = {
    "adaptive": lambda options, rng: Adaptive(),
    "consistent-hash": _consistent_hash,
    "expected-latency": _expected_latency,
    "latency": lambda options, rng: Latency(),
    "least-requests": lambda options, rng: LeastRequests(),
    "locality": _locality,
    "power-of-two-choices": lambda options, rng: PowerOfTwoChoices(rng),
    "queue-depth": lambda options, rng: QueueDepth(),
    "random": lambda options, rng: RandomChoice(rng),
    "round-robin": lambda options, rng: RoundRobin(),
    "throughput": lambda options, rng: Throughput(),
    "weighted-round-robin": lambda options, rng: WeightedRoundRobin(),
    "weighted-score": _weighted_score,
    "weighted-split": _weighted_split,
}

NAMES: frozenset[str] = frozenset(_BUILDERS)


def build(name: str, options: Mapping[str, object], rng: random.Random) -> Strategy:
    """A new strategy with its own state. Raises ``ValueError`` for an unknown name, option or value."""
    builder = _BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"no strategy is called {name!r}; there are {', '.join(sorted(NAMES))}")
    reader = Options(name, options)
    strategy = builder(reader, rng)
    reader.finish()
    return strategy
