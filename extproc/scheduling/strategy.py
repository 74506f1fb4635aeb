"""The one interface of every routing strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from extproc.fleet.endpoint import Endpoint


@dataclass(slots=True)
class Query:
    """What a strategy may know of a request. Token numbers are estimates unless a tokenizer or usage said
    otherwise."""

    request_id: str
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Expected output tokens: the client's max_tokens or a learned mean."""
    stream: bool = False
    affinity_key: str = ""
    """Session, user or prompt-prefix digest: what consistent hashing hashes."""
    adapter: str = ""
    """LoRA adapter, when the model named one."""
    locality: str = ""
    session_endpoint: str = ""
    """Key of the endpoint that the request's session was last at."""
    session_saves_s: float = 0.0
    """Seconds that staying there is worth."""
    attention: float = 0.0
    """What attention adds to prefill, per token and token before it (:mod:`extproc.fleet.prefill`)."""
    queued: float = 0.0
    """Requests that wait in the gateway for the same endpoints, for each of them."""
    blocks: Sequence[int] = ()
    """Chained hashes of the prompt's full blocks, first block first."""


@dataclass(slots=True)
class Candidate:
    """An endpoint that may take the request, and how many leading prompt tokens it holds."""

    endpoint: Endpoint
    matched_tokens: int = 0


@dataclass(slots=True)
class Choice:
    """A candidate with its cost (lower is better; the unit is the strategy's) and the terms the cost is made
    of."""

    endpoint: Endpoint
    cost: float = 0.0
    terms: tuple[float, ...] = field(default=())
    """Values in the order of the strategy's ``terms``."""
    matched_tokens: int = 0


class Strategy(Protocol):
    """Orders candidates. One small class with one method; learned state lives on the endpoints or in the
    object."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names (with unit) of the numbers in ``Choice.terms``."""
        ...

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """All candidates, best first. Never empty for non-empty candidates; never opens leases itself."""
        ...
