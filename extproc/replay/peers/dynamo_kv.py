"""KV-aware cost.

Source: ai-dynamo/dynamo, scheduling/selector/default.rs (November 2026): in KV blocks,
``cost = prefill_load_scale * max(active prefill + request - overlap_credit * overlap, 0) + decode blocks`` with both
factors 1. Active prefill blocks count from the decision to the first token, decode blocks (the request's own prompt
included) until the end; temperature 0: the lowest cost, ties by chance.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.replay.peers.in_flight import Watching
from extproc.scheduling.strategy import Candidate, Choice, Query

_BLOCK = 16.0


class DynamoKv(Watching):
    """Cost in blocks of 16 tokens."""

    terms = ("prefill blocks", "decode blocks")

    def __init__(self, rng: random.Random, overlap_credit: float = 1.0, prefill_scale: float = 1.0) -> None:
        super().__init__()
        self._rng = rng
        self._credit = overlap_credit
        self._scale = prefill_scale

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Lowest cost first."""
        choices = []
        for candidate in candidates:
            books = self.books.of(candidate.endpoint)
            raw = books.prefill_tokens + query.prompt_tokens
            prefill = max(raw - self._credit * candidate.matched_tokens, 0.0) / _BLOCK * self._scale
            decode = (books.tokens + query.prompt_tokens) / _BLOCK
            choices.append(
                Choice(candidate.endpoint, prefill + decode, (prefill, decode), candidate.matched_tokens)
            )
        self._rng.shuffle(choices)
        choices.sort(key=lambda choice: choice.cost)
        best = choices[0]
        uncached = query.prompt_tokens - best.matched_tokens
        self.books.sent(query.request_id, best.endpoint, uncached, query.prompt_tokens)
        return choices
