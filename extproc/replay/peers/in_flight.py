"""What a proxy that reads the response stream knows of the requests it sent: which have their first token, which
have ended. Peers' gateways keep such books; ours hears of ends only."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.fleet.endpoint import Endpoint


@dataclass(slots=True)
class Books:
    """Of one endpoint."""

    requests: int = 0
    prefill_tokens: float = 0.0
    """Uncached tokens of requests whose first token has not come."""
    tokens: float = 0.0
    """Prompt tokens of all open requests."""


@dataclass(slots=True)
class InFlight:
    """Books of all endpoints. The policy that owns it passes the driver's news on."""

    _books: dict[str, Books] = field(default_factory=dict)
    _open: dict[str, tuple[Books, float, float]] = field(default_factory=dict)

    def of(self, endpoint: Endpoint) -> Books:
        """One endpoint's books."""
        books = self._books.get(endpoint.key)
        if books is None:
            books = self._books[endpoint.key] = Books()
        return books

    def sent(self, request_id: str, endpoint: Endpoint, uncached: float, tokens: float) -> None:
        """A request goes to the endpoint."""
        books = self.of(endpoint)
        books.requests += 1
        books.prefill_tokens += uncached
        books.tokens += tokens
        self._open[request_id] = (books, uncached, tokens)

    def first_token(self, request_id: str) -> None:
        """Its prefill is done."""
        entry = self._open.get(request_id)
        if entry is not None:
            books, uncached, tokens = entry
            books.prefill_tokens -= uncached
            self._open[request_id] = (books, 0.0, tokens)

    def ended(self, request_id: str) -> None:
        """It is no longer there."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            books, uncached, tokens = entry
            books.requests -= 1
            books.prefill_tokens -= uncached
            books.tokens -= tokens


class Watching:
    """A policy with books, fed by whoever sees the responses."""

    def __init__(self) -> None:
        self.books = InFlight()

    def first_token(self, request_id: str) -> None:
        """The first token of a request passed by."""
        self.books.first_token(request_id)

    def ended(self, request_id: str) -> None:
        """The response ended, or the request failed."""
        self.books.ended(request_id)
