"""The terms of an endpoint's cost, each in seconds: how much longer a request takes there than on an idle,
warm engine.

Rules of this file:

- a term answers for all candidates in one call, in their order: a decision over a thousand endpoints makes
  eight calls;
- a term is finite and never negative, whatever an engine says or does not say;
- what only a scrape can know counts by the scrape's age (``Endpoint.trust``); the rest of its weight, and all
  of it where an engine does not say, goes to the mean of the candidates that do. Unknown is neither good nor
  bad;
- what our own leases know needs no scrape: with all metrics gone, queue, prefill and decode still tell
  endpoints apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Protocol

from extproc.fleet.prefill import work
from extproc.scheduling.strategy import Candidate, Query

STREAM_WEIGHT = 0.3
"""A second lost while an answer streams, in seconds of waiting for it to begin: its reader sees slower text,
not none."""
STALL_SHARE = 0.1
"""A stall in the middle of a stream that runs already, against the request's own stream being slow from end to end:
most of it disappears in the reader's own pace."""
DELAYED = 4.0
"""Requests that a piece of work delays, for each that waits now. A queue of ``w`` at a load of ``r`` is gone when
``w / (1 - r)`` have been served, those that came meanwhile included; queues that last mean a load of three quarters."""
_MOST_QUEUED = 8.0
"""Requests waiting in the gateway that count, for each endpoint: those far behind are more likely refused than delayed."""
MAX_INTERVAL_S = 30.0
"""Longest wait for one place that is believed."""
_BARRIER_FROM = 0.9
_BARRIER_TOP = 0.99


class Scene:
    """The candidates of one decision, with what several terms need read once."""

    __slots__ = ("_works", "backlogs", "endpoints", "matched", "rates", "trusts")

    def __init__(self, candidates: Sequence[Candidate], now: float) -> None:
        self.endpoints = [candidate.endpoint for candidate in candidates]
        self.rates = [endpoint.rates.prefill_at(now) for endpoint in self.endpoints]
        """Prefill tokens per second."""
        self.backlogs = [
            endpoint.backlog.tokens(now, rate)
            for endpoint, rate in zip(self.endpoints, self.rates, strict=True)
        ]
        """Tokens to prefill before anything new."""
        self.trusts = [
            1.0 if now <= endpoint.fresh_until else endpoint.trust(now) for endpoint in self.endpoints
        ]
        """How much the newest scrape counts, 0 to 1."""
        self.matched = [
            candidate.matched_tokens and candidate.matched_tokens * candidate.endpoint.rates.match_trust(now)
            for candidate in candidates
        ]
        """Prompt tokens held, discounted where usage reports say that matches were too good."""
        self._works: list[float] | None = None

    def works(self, query: Query) -> list[float]:
        """Units of work that the scene's one prompt is on each candidate, where it is not cached."""
        if self._works is None:
            prompt, share = query.prompt_tokens, query.attention
            self._works = [work(prompt - matched, matched, share) for matched in self.matched]
        return self._works

    def blend(self, column: list[float | None]) -> list[float]:
        """What scrapes said: by trust, and for the rest the mean of those that are known."""
        trusts = self.trusts
        if None not in column and min(trusts) == 1.0:
            return column  # type: ignore[return-value]
        if column.count(None) == len(column):
            return [0.0] * len(column)
        weights = [0.0 if value is None else trust for value, trust in zip(column, trusts, strict=True)]
        total = sum(weights)
        if total <= 0.0:
            return [0.0] * len(column)
        mean = sum((value or 0.0) * weight for value, weight in zip(column, weights, strict=True)) / total
        return [
            (value or 0.0) * weight + mean * (1.0 - weight)
            for value, weight in zip(column, weights, strict=True)
        ]


class Term(Protocol):
    """One cost term."""

    @property
    def name(self) -> str:
        """A word for explain and metrics; the unit is seconds."""
        ...

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """The term for every candidate, in order."""
        ...


class QueueTerm:
    """Prompt tokens that the endpoint must prefill first, over its prefill rate; and while it hangs, until it moves.

    Source: open leases, corrected by the engine's counters (:mod:`extproc.fleet.backlog`). Requests with the
    same prefix that are still being prefilled are in here too: a follower waits for the one that computes
    what it will reuse.
    """

    name = "queue"

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """``backlog / rate + standstill``."""
        return [
            backlog / rate + endpoint.standstill.seconds(now)
            for backlog, rate, endpoint in zip(scene.backlogs, scene.rates, scene.endpoints, strict=True)
        ]


class PrefillTerm:
    """The request's own prompt tokens that are not cached there, over the prefill rate.

    In a fleet with queues, work that need not be done delays more than its own request: all that wait behind it, as
    many as wait on the typical endpoint and in the gateway, and all that come before its queue is empty again
    (:data:`DELAYED`). So beyond the first, each of them adds the same work once more, at the fleet's mean rate: how fast
    the endpoint is makes no difference to what the fleet loses. How many wait is told by the work that is left, which
    leaks between scrapes, and not by the requests that nobody has told of yet. Without this a fleet near its limit spreads
    conversations for the sake of queues, computes them again everywhere, and thereby makes the queues. Typical is the
    lower median: while half of the fleet is idle, computing a hot prefix there delays nobody, however long the queue is
    where it is cached.

    Source: the cache view's match, discounted by ``Rates.match_trust``; unstarted leases.
    """

    name = "prefill"

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """``work(prompt - matched * trust) * (1 / rate + DELAYED * (max(waiting - 1, 0) + queued) / mean rate)``."""
        waiting = median_low(
            endpoint.backlog.waiting(backlog)
            for backlog, endpoint in zip(scene.backlogs, scene.endpoints, strict=True)
        )
        mean_rate = sum(scene.rates) / len(scene.rates)
        waiting = max(waiting - 1.0, 0.0) + min(query.queued, _MOST_QUEUED)  # one of them is being computed
        behind = DELAYED * waiting / mean_rate
        return [
            units * (1.0 / rate + behind) for units, rate in zip(scene.works(query), scene.rates, strict=True)
        ]


class StallTerm:
    """What the streams on the endpoint lose while this prompt is prefilled: engines share every step between
    prefill and decode, so a prompt computed anew holds up all of them.

    Without this term a fleet under load spreads conversations for the sake of a short queue, computes them
    again everywhere, and every stream pays. ``weight`` as in :class:`DecodeTerm`. Source: open leases,
    uncached tokens, rate.
    """

    name = "stall"

    def __init__(self, weight: float = STREAM_WEIGHT) -> None:
        self._weight = weight * STALL_SHARE

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """``work(uncached) / rate * leases * weight``, a tenth of the stream's weight for each."""
        weight = self._weight
        return [
            units / rate * endpoint.leases * weight
            for units, rate, endpoint in zip(scene.works(query), scene.rates, scene.endpoints, strict=True)
        ]


class SlotsTerm:
    """Requests that must complete before this one may run, times the endpoint's completion interval: what that takes
    longer than the prompts ahead, which are computed meanwhile.

    Counted are: requests waiting in the engine that our unstarted leases do not explain; requests beyond the
    engine's slots once these are known; completions that free enough KV blocks when the prompt and those that
    have not started do not fit: memory is wanted for whole prompts, however much of them may be computed by now.
    A queue that waits for slots or memory moves at completion rate, however fast prefill is. Source: gauges and
    leases (:mod:`extproc.fleet.strangers`), learned intervals (:mod:`extproc.fleet.rates`).
    """

    name = "slots"

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """``max(unexplained or beyond slots, beyond KV) * completion interval - queue``, never below 0."""
        column: list[float | None] = []
        prompt = query.prompt_tokens
        for endpoint, matched, backlog, rate in zip(
            scene.endpoints, scene.matched, scene.backlogs, scene.rates, strict=True
        ):
            strangers = endpoint.strangers
            ahead = strangers.waiting
            if ahead is None:
                column.append(None)
                continue
            running = strangers.running or 0.0
            if strangers.slots is not None:
                beyond = endpoint.leases + running + ahead + 1 - strangers.slots
                if beyond > ahead:
                    ahead = beyond
            if strangers.free_tokens is not None:
                waiting = endpoint.backlog.charged / endpoint.backlog.per_token
                short = prompt - matched + waiting - strangers.free_tokens
                if short > 0.0 and short > ahead * strangers.tokens_per_request:
                    ahead = short / strangers.tokens_per_request
            if ahead > 0.0:
                interval = endpoint.rates.completion_interval(endpoint.leases + running)
                place_s = ahead * min(interval, MAX_INTERVAL_S)
                column.append(max(place_s - backlog / rate, 0.0))
            else:
                column.append(0.0)
        return scene.blend(column)


class DecodeTerm:
    """How much longer the answer takes because of the streams already there.

    It spreads long answers when every replica holds the prompt. Source: expected output tokens, open leases
    plus strangers' running requests, and the learned seconds per output token and stream (``Pace.slowdown``).
    ``weight``: what a second lost in a stream counts.
    """

    name = "decode"

    def __init__(self, weight: float = STREAM_WEIGHT) -> None:
        self._weight = weight

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """``output tokens * slow-down * active streams * weight``."""
        output = query.output_tokens * self._weight
        if output <= 0:
            return [0.0] * len(scene.endpoints)
        strangers = scene.blend([endpoint.strangers.running for endpoint in scene.endpoints])
        return [
            output * endpoint.rates.pace.slowdown * (endpoint.leases + others)
            for endpoint, others in zip(scene.endpoints, strangers, strict=True)
        ]


class PressureTerm:
    """Nearness to a full KV cache, where engines preempt requests and compute them again; of engines that do not tell
    how large it is. Where the room is known, :class:`SlotsTerm` knows whether this prompt fits.

    ``k`` is KV use with the tokens not yet prefilled added. The barrier ``k / (1 - k)`` starts at 0.9 and
    reaches one mean service time at 0.99: by then a request likely waits for another to end. Source: the KV
    gauge, learned service time.
    """

    name = "pressure"

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """``service * (k / (1 - k) - 9) / 90`` above 0.9."""
        column: list[float | None] = []
        for endpoint, backlog in zip(scene.endpoints, scene.backlogs, strict=True):
            state = endpoint.state
            usage = None if state is None else state.kv_usage
            if usage is None or not 0.0 <= usage <= 1.0:
                column.append(None)
                continue
            if endpoint.strangers.free_tokens is not None:
                column.append(0.0)
                continue
            if backlog > 0.0:
                room = endpoint.kv_tokens
                if room:
                    usage += backlog / endpoint.backlog.per_token / room
            column.append(_barrier(usage) * endpoint.rates.service if usage > _BARRIER_FROM else 0.0)
        return scene.blend(column)


def _barrier(usage: float) -> float:
    usage = min(usage, 0.995)
    start, top = _BARRIER_FROM / (1 - _BARRIER_FROM), _BARRIER_TOP / (1 - _BARRIER_TOP)
    return (usage / (1 - usage) - start) / (top - start)
