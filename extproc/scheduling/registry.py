"""Every strategy by its name in the configuration. A new one is a file in ``strategies/`` and a line here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from extproc.scheduling.options import Options
from extproc.scheduling.strategies.least_requests import LeastRequests
from extproc.scheduling.strategies.round_robin import RoundRobin
from extproc.scheduling.strategy import Strategy

_BUILDERS: dict[str, Callable[[Options, random.Random], Strategy]] = {
    "round-robin": lambda options, rng: RoundRobin(),
    "least-requests": lambda options, rng: LeastRequests(),
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
