"""Limits that several gateways share, in Redis or Valkey.

Rules of this file:

- one script takes from all scopes or from none, by the server's clock; the same script gives back (a negative cost,
  unconditionally);
- a request waits for the store no longer than ``timeout``. Without an answer it is served without limits or refused,
  as the configuration says, and for a second nobody asks again;
- what was granted after we stopped waiting, or for a client that left meanwhile, is given back;
- corrections and refunds go out in the background: a request's end waits for nothing;
- running requests (``concurrency``) are counted in each process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.admission.rules import Demand
from extproc.config.schema.traffic import RedisSettings
from extproc.config.secrets import secret
from extproc.limits.bucket import day_of
from extproc.limits.headers import refused, shown
from extproc.limits.limit import Key, Scopes
from extproc.limits.limiter import Limiter, Refusal, Reserved
from extproc.routing.rejection import Rejection

log = logging.getLogger(__name__)

_REST_S = 1.0
_MOST_CORRECTIONS = 10_000
_CORRECTION_S = 1.0

SCRIPT = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1e6
local force = ARGV[1] == '1'
local left, worst, at = {}, 0, 0
for i = 1, #KEYS do
  local capacity, rate, cost = tonumber(ARGV[3*i-1]), tonumber(ARGV[3*i]), tonumber(ARGV[3*i+1])
  local wait = 0
  if rate > 0 then
    local known = redis.call('HMGET', KEYS[i], 'l', 't')
    left[i] = capacity
    if known[1] then
      left[i] = math.min(tonumber(known[1]) + math.max(now - tonumber(known[2]), 0) * rate, capacity)
    end
    local missing = math.min(cost, capacity) - left[i]
    if missing > 1e-6 * math.max(capacity, 1) then wait = missing / rate end
  else
    left[i] = capacity - tonumber(redis.call('GET', KEYS[i]) or '0')
    if left[i] < math.min(cost, capacity) then wait = 86400 - now % 86400 end
  end
  if wait > worst then worst, at = wait, i end
end
if worst > 0 and not force then
  local out = {at, tostring(worst)}
  for i = 1, #KEYS do out[i+2] = tostring(left[i]) end
  return out
end
local out = {0, '0'}
for i = 1, #KEYS do
  local capacity, rate, cost = tonumber(ARGV[3*i-1]), tonumber(ARGV[3*i]), tonumber(ARGV[3*i+1])
  left[i] = math.min(left[i] - cost, capacity)
  if rate > 0 then
    redis.call('HSET', KEYS[i], 'l', tostring(left[i]), 't', tostring(now))
    redis.call('EXPIRE', KEYS[i], math.ceil((capacity - left[i]) / rate) + 60)
  else
    redis.call('INCRBYFLOAT', KEYS[i], tostring(cost))
    redis.call('EXPIRE', KEYS[i], 172800)
  end
  out[i+2] = tostring(left[i])
end
return out
"""


@dataclass(slots=True, frozen=True)
class _Part:
    """One bucket of one scope. ``rate`` 0: a day's budget."""

    name: str
    scope: Key
    kind: str
    limit: float
    capacity: float
    rate: float
    cost: float


@dataclass(slots=True)
class StoreCounts:
    """Running totals, read by the metrics."""

    asked: int = 0
    failed: int = 0
    lost: int = 0
    """Corrections that did not reach the store."""


@dataclass(slots=True)
class RemoteReservation:
    """What the store granted. Closed once, as a local one is."""

    tokens: float
    store: RedisLimits | None
    parts: Sequence[_Part] = ()
    headers: tuple[tuple[str, str], ...] | None = ()
    open: bool = True

    def settle(self, used: float, now: float) -> None:
        """Correct the tokens to what was used."""
        self._close({"tokens": used - self.tokens, "day": used - self.tokens})

    def refund(self, now: float) -> None:
        """Give back everything."""
        self._close({"tokens": -self.tokens, "day": -self.tokens, "requests": -1.0})

    def _close(self, costs: dict[str, float]) -> None:
        if not self.open:
            return
        self.open = False
        parts = [part for part in self.parts if costs.get(part.kind)]
        if self.store is not None and parts:
            self.store.correct(parts, [costs[part.kind] for part in parts])


@dataclass(slots=True)
class RedisLimits:
    """The client of the store."""

    settings: RedisSettings
    limiter: Limiter
    clock: Callable[[], float] = time.monotonic
    counts: StoreCounts = field(default_factory=StoreCounts)
    _client: Any = None
    _script: Any = None
    _resting_until: float = 0.0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Make the client; it connects when it is first asked.

        Raises:
            RuntimeError: the client library is not installed.
        """
        try:
            from redis.asyncio import Redis
        except ImportError as error:
            raise RuntimeError("`rate_limits.store: redis` needs `pip install extproc[redis]`") from error
        url = self.settings.url.replace("valkeys://", "rediss://").replace("valkey://", "redis://")
        password = secret(self.settings.password) if self.settings.password else None
        self._client = Redis.from_url(
            url, password=password, socket_connect_timeout=0.5, retry=None, retry_on_error=[]
        )
        self._script = self._client.register_script(SCRIPT)

    async def reserve(self, demand: Demand | Rejection) -> Reserved | Rejection | None:
        """Take what the request needs; None when it needs nothing (or cannot be routed, which is said elsewhere)."""
        if isinstance(demand, Rejection) or not demand.scopes:
            return None
        parts = self._parts(demand.scopes, demand.tokens)
        if not parts:
            return RemoteReservation(demand.tokens, None)
        if self.clock() < self._resting_until:
            return self._unanswered(demand)
        self.counts.asked += 1
        asking = asyncio.ensure_future(self._run(parts, [part.cost for part in parts], force=False))
        try:
            reply = await asyncio.wait_for(asyncio.shield(asking), self.settings.timeout)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda done: self._undo(done, parts))
            raise
        except Exception as error:
            # A timeout, a refused connection or an error of the server: the client library has many of them.
            if self.clock() >= self._resting_until:
                log.warning("store of limits did not answer", extra={"reason": type(error).__name__})
            self._resting_until = self.clock() + _REST_S
            self.counts.failed += 1
            asking.add_done_callback(lambda done: self._undo(done, parts))
            return self._unanswered(demand)
        return self._granted(reply, parts, demand)

    def correct(self, parts: Sequence[_Part], costs: Sequence[float]) -> None:
        """Take (or, below zero, give back) these amounts, some time soon."""
        if len(self._tasks) >= _MOST_CORRECTIONS:
            self.counts.lost += 1
            return
        self._spawn(self._correct(parts, costs))

    async def close(self) -> None:
        """Let corrections end, then the connection."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_CORRECTION_S)
        await self._client.aclose()

    def close_soon(self) -> None:
        """The same in the background."""
        self._tasks.add(task := asyncio.ensure_future(self._client.aclose()))
        task.add_done_callback(self._tasks.discard)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _correct(self, parts: Sequence[_Part], costs: Sequence[float]) -> None:
        try:
            await asyncio.wait_for(self._run(parts, costs, force=True), _CORRECTION_S)
        except asyncio.CancelledError:
            raise
        except Exception:
            self.counts.lost += 1

    async def _run(self, parts: Sequence[_Part], costs: Sequence[float], *, force: bool) -> list[Any]:
        arguments: list[object] = ["1" if force else "0"]
        for part, cost in zip(parts, costs, strict=True):
            arguments += [repr(part.capacity), repr(part.rate), repr(float(cost))]
        return list(await self._script(keys=[part.name for part in parts], args=arguments))

    def _undo(self, done: asyncio.Future[list[Any]], parts: Sequence[_Part]) -> None:
        if not done.cancelled() and done.exception() is None and int(done.result()[0]) == 0:
            self.correct(parts, [-part.cost for part in parts])

    def _granted(self, reply: Sequence[Any], parts: Sequence[_Part], demand: Demand) -> Reserved | Rejection:
        at, wait_s = int(reply[0]), float(reply[1])
        left = [float(value) for value in reply[2:]]
        headers = _headers(parts, left)
        if at:
            part = parts[at - 1]
            refusal = Refusal(part.scope, part.kind, wait_s, part.limit)
            self.limiter.refused(refusal)
            return refused(refusal, headers)
        return RemoteReservation(demand.tokens, self, parts, headers)

    def _unanswered(self, demand: Demand) -> Reserved | Rejection:
        if self.settings.on_failure == "open":
            return RemoteReservation(demand.tokens, None)
        message = "The gateway cannot check rate limits at the moment."
        return Rejection(503, "server_error", "no_capacity", message, "limits_unknown", retry_after_s=1.0)

    def _parts(self, scopes: Scopes, tokens: float) -> list[_Part]:
        day = day_of(self.clock() + self.limiter.wall_offset)
        prefix = "{" + self.settings.prefix + "}"
        found = []
        for key, limit in scopes:
            name = f"{prefix}{key[0]}:{key[1]}:"
            for kind, said, cost in (("requests", limit.rpm, 1.0), ("tokens", limit.tpm, tokens)):
                if said is not None:
                    capacity = max(said / 60.0 * limit.burst_s, 1.0)
                    found.append(_Part(name + kind, key, kind, said, capacity, said / 60.0, cost))
            if limit.tokens_per_day is not None:
                most = limit.tokens_per_day
                found.append(_Part(f"{name}day:{day}", key, "day", most, most, 0.0, tokens))
        return found


def _headers(parts: Sequence[_Part], left: Sequence[float]) -> tuple[tuple[str, str], ...]:
    out: tuple[tuple[str, str], ...] = ()
    for kind in ("requests", "tokens"):
        rows = [
            (level / part.capacity, part, level)
            for part, level in zip(parts, left, strict=True)
            if part.kind == kind
        ]
        if rows:
            _, part, level = min(rows, key=lambda row: row[0])
            out += shown(kind, part.limit, level, max(part.capacity - level, 0.0) / part.rate)
    return out
