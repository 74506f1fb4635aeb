"""Policies by name: our own strategies, and the peers'."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.replay.errors import ReplayError
from extproc.replay.peers import PEERS
from extproc.scheduling import registry
from extproc.scheduling.options import Options
from extproc.scheduling.strategy import Strategy

DEFAULT = "expected-latency"
COMPARED = (
    DEFAULT,
    "random",
    "round-robin",
    "least-requests",
    "power-of-two-choices",
    "consistent-hash",
    *PEERS,
)
"""What is compared when nobody names a policy."""


@dataclass(slots=True, frozen=True)
class Policy:
    """A policy with its options, as often built as there are runs."""

    name: str
    strategy: str
    options: Mapping[str, object] = field(default_factory=dict)

    def build(self, rng: random.Random) -> Strategy:
        """A new strategy with its own state.

        Raises:
            ReplayError: an unknown option or a value out of range.
        """
        try:
            if self.strategy not in PEERS:
                return registry.build(self.strategy, self.options, rng)
            reader = Options(self.strategy, self.options)
            strategy = PEERS[self.strategy](reader, rng)
            reader.finish()
        except ValueError as error:
            raise ReplayError(str(error)) from error
        return strategy


def parse_policy(words: str) -> Policy:
    """Read ``NAME[:key=value…]``; numbers are read as numbers.

    Raises:
        ReplayError: no such policy, or options it does not take.
    """
    name, *pairs = words.split(":")
    if name not in PEERS and name not in registry.NAMES:
        known = ", ".join(sorted(set(PEERS) | registry.NAMES))
        raise ReplayError(f"no policy is called {name!r}; there are {known}")
    options: dict[str, object] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise ReplayError(f"policy {words!r}: write options as key=value, not {pair!r}")
        options[key] = _value(value)
    policy = Policy(words, name, options)
    policy.build(random.Random(0))
    return policy


def _value(word: str) -> object:
    try:
        return float(word)
    except ValueError:
        return word
