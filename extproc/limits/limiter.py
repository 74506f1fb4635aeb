"""Reserve on arrival, settle when usage is known, refund what was not served.

Rules of this file:

- a request is admitted in all of its scopes or in none; a refusal takes nothing, and says which limit and for how
  long;
- a reservation is closed exactly once: settled (tokens corrected to what was used; the request stays counted) or
  refunded (both given back). Closing it again does nothing;
- requests running at once are counted here too, but they are a condition of dispatch, not of arrival: the queue asks
  :meth:`Limiter.blocked` and takes and releases places;
- meters are kept by scope over reloads; a changed limit keeps what was used. Meters of client addresses are capped:
  the longest unused one that has nothing running goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from extproc.limits.bucket import Bucket, DayBudget, day_of
from extproc.limits.limit import Key, Limit, LimitRules, Scopes
from extproc.routing.tenant import Tenant

MAX_CLIENTS = 20_000
_MAX_KNOWN = 8192


class Meter:
    """What one scope has used."""

    __slots__ = ("day", "key", "limit", "requests", "running", "tokens")

    def __init__(self, key: Key, limit: Limit, now: float) -> None:
        self.key = key
        self.limit = limit
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.day: DayBudget | None = None
        self.change(limit, now)

    def change(self, limit: Limit, now: float) -> None:
        """Take over a limit of a new configuration."""
        self.limit = limit
        self.requests = _resized(self.requests, limit.rpm, limit.burst_s, now)
        self.tokens = _resized(self.tokens, limit.tpm, limit.burst_s, now)
        if limit.tokens_per_day is None:
            self.day = None
        elif self.day is None:
            self.day = DayBudget(limit.tokens_per_day)
        else:
            self.day.limit = limit.tokens_per_day


def _resized(bucket: Bucket | None, per_minute: float | None, burst_s: float, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    rate = per_minute / 60.0
    capacity = max(rate * burst_s, 1.0)
    if bucket is None:
        return Bucket(capacity, rate, now)
    if (bucket.capacity, bucket.rate) != (capacity, rate):
        bucket.resize(capacity, rate, now)
    return bucket


@dataclass(slots=True, frozen=True)
class Refusal:
    """The limit that is used up; ``kind`` is requests, tokens or day."""

    key: Key
    kind: str
    retry_after_s: float
    limit: float


class Reserved(Protocol):
    """A request's part of its limits, kept here or in a shared store."""

    @property
    def tokens(self) -> float:
        """Tokens that were reserved."""
        ...

    @property
    def headers(self) -> tuple[tuple[str, str], ...] | None:
        """Headers for the client, where the store made them; None: they are made of the meters."""
        ...

    def settle(self, used: float, now: float) -> None:
        """The request was served and used this many tokens."""
        ...

    def refund(self, now: float) -> None:
        """The request was not served: it costs nothing."""
        ...


@dataclass(slots=True)
class Reservation:
    """See the rules above."""

    tokens: float
    meters: Sequence[Meter]
    limiter: Limiter
    day: int
    open: bool = True
    headers: None = None

    def settle(self, used: float, now: float) -> None:
        """Correct the tokens to what was used."""
        self._close(self.tokens - used, 0.0, now)

    def refund(self, now: float) -> None:
        """Give back everything."""
        self._close(self.tokens, 1.0, now)

    def _close(self, tokens: float, requests: float, now: float) -> None:
        if not self.open:
            return
        self.open = False
        for meter in self.meters:
            if requests and meter.requests is not None:
                meter.requests.add(requests, now)
            if meter.tokens is not None:
                meter.tokens.add(tokens, now)
            if meter.day is not None:
                meter.day.give(tokens, self.day)


@dataclass(slots=True)
class LimitCounts:
    """Running totals, read by the metrics: (kind of scope, kind of limit) -> refusals."""

    refused: dict[tuple[str, str], int] = field(default_factory=dict)


class Limiter:
    """Limits kept in this process. ``now`` is monotonic; ``wall_offset`` turns it into Unix time."""

    def __init__(self, rules: LimitRules | None = None, *, max_clients: int = MAX_CLIENTS) -> None:
        self.rules = rules or LimitRules()
        self.wall_offset = 0.0
        """Unix time minus monotonic time, set by whoever has clocks."""
        self.counts = LimitCounts()
        self.max_clients = max_clients
        self._meters: dict[Key, Meter] = {}
        self._clients: OrderedDict[str, Meter] = OrderedDict()
        self._known: dict[tuple[str, str, str], tuple[Meter, ...]] = {}

    def install(self, rules: LimitRules, now: float) -> None:
        """Take over the limits of a new configuration (or of a schedule)."""
        self.rules = rules
        self._known = {}
        # Which scopes still have a limit shows when they are next asked for; those that nobody asks for hold
        # what was used until then.
        for meter in self._clients.values():
            meter.change(rules.client, now)

    def __len__(self) -> int:
        return len(self._meters) + len(self._clients)

    @property
    def clients(self) -> int:
        """Client addresses remembered."""
        return len(self._clients)

    def scopes(self, tenant: Tenant, model: str, route: str, client: str) -> Scopes:
        """The limits of a request, for a store that keeps them elsewhere."""
        scopes = self.rules.scopes(tenant, model, route)
        if client and self.rules.client:
            scopes += ((("client", client), self.rules.client),)
        return scopes

    def meters(self, tenant: Tenant, model: str, route: str, client: str, now: float) -> tuple[Meter, ...]:
        """The meters of a request, made when they are new."""
        known = self._known.get((tenant.name, model, route))
        if known is None:
            known = tuple(
                self._meter(key, limit, now) for key, limit in self.rules.scopes(tenant, model, route)
            )
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[tenant.name, model, route] = known
        if client and self.rules.client:
            return (*known, self._client(client, now))
        return known

    def reserve(self, meters: Sequence[Meter], tokens: float, now: float) -> Reservation | Refusal:
        """One request of so many tokens, in all meters or in none. The refusal is of the limit that takes longest."""
        wall = now + self.wall_offset
        worst: Refusal | None = None
        for meter in meters:
            for kind, wait_s, limit in _waits(meter, tokens, now, wall):
                if wait_s > 0.0 and (worst is None or wait_s > worst.retry_after_s):
                    worst = Refusal(meter.key, kind, wait_s, limit)
        if worst is not None:
            self.refused(worst)
            return worst
        for meter in meters:
            if meter.requests is not None:
                meter.requests.add(-1.0, now)
            if meter.tokens is not None:
                meter.tokens.add(-tokens, now)
            if meter.day is not None:
                meter.day.take(tokens, wall)
        return Reservation(tokens, meters, self, day_of(wall))

    def refused(self, refusal: Refusal) -> None:
        """Count a refusal."""
        label = (refusal.key[0], refusal.kind)
        self.counts.refused[label] = self.counts.refused.get(label, 0) + 1

    def blocked(self, meters: Iterable[Meter]) -> Meter | None:
        """The first meter that has no place for one more running request."""
        for meter in meters:
            most = meter.limit.concurrency
            if most is not None and meter.running >= most:
                return meter
        return None

    def places(self, key: Key) -> int:
        """Free places for running requests in one scope; a scope that is gone has plenty."""
        meter = self._clients.get(key[1]) if key[0] == "client" else self._meters.get(key)
        if meter is None or meter.limit.concurrency is None:
            return 1_000_000
        return meter.limit.concurrency - meter.running

    def used_today(self, day: int) -> dict[str, tuple[int, float]]:
        """Scope -> (day, tokens used), to be written down. Client addresses are not among them."""
        return {
            "\0".join(key): (day, meter.day.used)
            for key, meter in self._meters.items()
            if meter.day is not None and meter.day.day == day and meter.day.used
        }

    def restore_days(self, used: dict[str, tuple[int, float]]) -> None:
        """What :meth:`used_today` gave, before a restart."""
        for text, (day, tokens) in used.items():
            kind, _, name = text.partition("\0")
            meter = self._meters.get((kind, name)) or Meter((kind, name), Limit(tokens_per_day=1.0), 0.0)
            self._meters[kind, name] = meter
            if meter.day is not None:
                meter.day.day, meter.day.used = day, tokens

    def _meter(self, key: Key, limit: Limit, now: float) -> Meter:
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = Meter(key, limit, now)
        elif meter.limit != limit:
            meter.change(limit, now)
        return meter

    def _client(self, client: str, now: float) -> Meter:
        meter = self._clients.get(client)
        if meter is None:
            meter = self._clients[client] = Meter(("client", client), self.rules.client, now)
            if len(self._clients) > self.max_clients:
                self._forget_client()
        else:
            self._clients.move_to_end(client)
        return meter

    def _forget_client(self) -> None:
        for _ in range(64):
            address, meter = next(iter(self._clients.items()))
            if not meter.running:
                del self._clients[address]
                return
            self._clients.move_to_end(address)


def _waits(meter: Meter, tokens: float, now: float, wall: float) -> Iterable[tuple[str, float, float]]:
    limit = meter.limit
    if meter.requests is not None and limit.rpm is not None:
        yield "requests", meter.requests.wait_s(1.0, now), limit.rpm
    if meter.tokens is not None and limit.tpm is not None:
        yield "tokens", meter.tokens.wait_s(tokens, now), limit.tpm
    if meter.day is not None and limit.tokens_per_day is not None:
        yield "day", meter.day.wait_s(tokens, wall), limit.tokens_per_day
