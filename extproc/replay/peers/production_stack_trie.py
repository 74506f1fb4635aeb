"""Longest prefix in a trie of everything ever sent.

Source: vllm-project/production-stack, ``prefixaware`` (November 2026): prompts are cut into chunks, a trie remembers
which endpoints got each; the endpoints at the deepest matching node are drawn by chance, load does not count, nothing
is ever forgotten. Where nothing matches, any endpoint is drawn. Its chunks are 128 characters; here they are the
core's blocks (a chain of hashes is a path in the trie).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.scheduling.strategy import Candidate, Choice, Query


class ProductionStackTrie:
    """Cost 0 for the endpoint drawn, 1 for the others of the deepest node, 2 for the rest."""

    terms = ("group",)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._holders: dict[int, int] = {}
        """Node -> bit mask of endpoint slots that ever got it."""

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Drawn from the deepest node's endpoints."""
        able = 0
        for candidate in candidates:
            able |= 1 << candidate.endpoint.slot
        deepest = able
        for block in query.blocks:
            here = self._holders.get(block, 0) & able
            if not here:
                break
            deepest = here
        matching = [c for c in candidates if deepest >> c.endpoint.slot & 1]
        chosen = self._rng.choice(matching)
        bit = 1 << chosen.endpoint.slot
        for block in query.blocks:
            self._holders[block] = self._holders.get(block, 0) | bit
        choices = []
        for candidate in candidates:
            group = 0.0 if candidate is chosen else 1.0 if deepest >> candidate.endpoint.slot & 1 else 2.0
            choices.append(Choice(candidate.endpoint, group, (group,), candidate.matched_tokens))
        choices.sort(key=lambda choice: choice.cost)
        return choices
