"""The terms of an endpoint's cost, each in seconds: how much longer a request takes there than on an idle,
warm engine.

Rules of this file:

- a term answers for all candidates in one call, in their order: a decision over a thousand endpoints makes
  six calls;
- a term is finite and never negative, whatever an engine says or does not say;
- what only a scrape can know counts by the scrape's age (``Endpoint.trust``); the rest of its weight, and all
  of it where an engine does not say, goes to the mean of the candidates that do. Unknown is neither good nor
  bad;
- what our own leases know needs no scrape: with all metrics gone, queue, prefill and decode still tell
  endpoints apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from extproc.fleet.endpoint import Endpoint
from extproc.fleet.strangers import number
from extproc.scheduling.strategy import Candidate, Query

MAX_SECONDS = 600.0
"""Bound of every term: worse than this is all the same."""
_MAX_INTERVAL_S = 30.0
_BARRIER_FROM = 0.9
_BARRIER_TOP = 0.99
_ADAPTER_FRESH_S = 10.0


class Term(Protocol):
    """One cost term."""

    @property
    def name(self) -> str:
        """A word for explain and metrics; the unit is seconds."""
        ...

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """The term for every candidate, in order."""
        ...


class QueueTerm:
    """Prompt tokens that the endpoint must prefill first, over its prefill rate.

    Source: open leases, corrected by the engine's counters (:mod:`extproc.fleet.backlog`). Requests with the
    same prefix that are still being prefilled are in here too: a follower waits for the one that computes
    what it will reuse.
    """

    name = "queue"

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """``backlog / rate``."""
        column = []
        for candidate in candidates:
            endpoint = candidate.endpoint
            rate = endpoint.rates.prefill_at(now)
            column.append(min(endpoint.backlog.tokens(now, rate) / rate, MAX_SECONDS))
        return column


class PrefillTerm:
    """The request's own prompt tokens that are not cached there, over the prefill rate.

    Source: the cache view's match, discounted where usage reports say that matches were too good
    (``Rates.match_trust``).
    """

    name = "prefill"

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """``(prompt - matched * trust) / rate``."""
        prompt = query.prompt_tokens
        column = []
        for candidate in candidates:
            rates = candidate.endpoint.rates
            matched = candidate.matched_tokens
            if matched:
                matched *= rates.match_trust(now)  # type: ignore[assignment]
            uncached = prompt - matched
            column.append(min(uncached / rates.prefill_at(now), MAX_SECONDS) if uncached > 0 else 0.0)
        return column


class SlotsTerm:
    """Requests that must complete before this one may run, times the endpoint's completion interval.

    Counted are: requests waiting in the engine that our unstarted leases do not explain; requests beyond the
    engine's slots once these are known; completions that free enough KV blocks when the prompt and those
    before it do not fit. A queue that waits for slots or memory moves at completion rate, however fast
    prefill is. Source: gauges and leases (:mod:`extproc.fleet.strangers`), learned intervals
    (:mod:`extproc.fleet.rates`).
    """

    name = "slots"

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """``max(unexplained or beyond slots, beyond KV) * completion interval``."""
        column: list[float | None] = []
        for candidate in candidates:
            endpoint = candidate.endpoint
            waiting = endpoint.strangers.waiting
            if waiting is None:
                column.append(None)
                continue
            running = endpoint.strangers.running or 0.0
            ahead = waiting
            slots = endpoint.strangers.slots
            if slots is not None:
                ahead = max(ahead, endpoint.leases + running + waiting + 1 - slots)
            ahead = max(ahead, _beyond_memory(candidate, query.prompt_tokens, now))
            if ahead > 0.0:
                interval = min(endpoint.rates.completion_interval(endpoint.leases + running), _MAX_INTERVAL_S)
                column.append(min(ahead * interval, MAX_SECONDS))
            else:
                column.append(0.0)
        return _blend(column, candidates, now)


class AdapterTerm:
    """Loading the request's LoRA adapter where it is not resident; a running adapter must end first if all
    places are taken.

    Source: the engine's list of adapters, and adapters that we sent requests for in the last seconds.
    """

    name = "adapter"

    def __init__(self, load_s: float = 0.5) -> None:
        self._load_s = load_s
        """Seconds to load an adapter: a 100 MB adapter from local disk or a warm page cache."""

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """0, or the loading time plus a completion interval where no place is free."""
        adapter = query.adapter
        if not adapter:
            return [0.0] * len(candidates)
        column: list[float | None] = []
        for candidate in candidates:
            endpoint = candidate.endpoint
            state = endpoint.state
            asked = endpoint.adapters.get(adapter)
            if asked is not None and now - asked < _ADAPTER_FRESH_S:
                column.append(0.0)
            elif state is None or state.running_adapters is None:
                column.append(None)
            elif adapter in state.running_adapters or adapter in (state.waiting_adapters or ()):
                column.append(0.0)
            else:
                full = state.max_lora is not None and len(state.running_adapters) >= state.max_lora
                wait = (
                    min(endpoint.rates.completion_interval(endpoint.leases), _MAX_INTERVAL_S) if full else 0.0
                )
                column.append(self._load_s + wait)
        return _blend(column, candidates, now)


class DecodeTerm:
    """How much longer the answer takes because of the streams already there.

    Source: expected output tokens, open leases plus strangers' running requests, and the learned seconds per
    output token and stream (``Rates.slowdown``). It spreads long answers when every replica holds the prompt.
    """

    name = "decode"

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """``output tokens * slow-down * active streams``."""
        output = query.output_tokens
        if output <= 0:
            return [0.0] * len(candidates)
        strangers = _blend(
            [candidate.endpoint.strangers.running for candidate in candidates], candidates, now
        )
        return [
            min(
                output * candidate.endpoint.rates.slowdown * (candidate.endpoint.leases + others), MAX_SECONDS
            )
            for candidate, others in zip(candidates, strangers, strict=True)
        ]


class PressureTerm:
    """Nearness to a full KV cache, where engines preempt requests and compute them again.

    ``k`` is KV use with the tokens not yet prefilled added. The barrier ``k / (1 - k)`` starts at 0.9 and
    reaches one mean service time at 0.99: by then a request likely waits for another to end. Source: the KV
    gauge, learned service time.
    """

    name = "pressure"

    def seconds(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[float]:
        """``service * (k / (1 - k) - 9) / 90`` above 0.9."""
        column: list[float | None] = []
        for candidate in candidates:
            endpoint = candidate.endpoint
            state = endpoint.state
            usage = number(state.kv_usage) if state is not None else None
            if usage is None or usage > 1.0:
                column.append(None)
                continue
            room = endpoint.kv_tokens
            if room:
                usage += endpoint.backlog.tokens(now, endpoint.rates.prefill_at(now)) / room
            column.append(_barrier(usage) * endpoint.rates.service if usage > _BARRIER_FROM else 0.0)
        return _blend(column, candidates, now)


def _barrier(usage: float) -> float:
    usage = min(usage, 0.995)
    start, top = _BARRIER_FROM / (1 - _BARRIER_FROM), _BARRIER_TOP / (1 - _BARRIER_TOP)
    return (usage / (1 - usage) - start) / (top - start)


def _beyond_memory(candidate: Candidate, prompt_tokens: int, now: float) -> float:
    endpoint: Endpoint = candidate.endpoint
    state, room = endpoint.state, endpoint.kv_tokens
    if state is None or not room:
        return 0.0
    usage = number(state.kv_usage)
    running = number(state.running)
    if usage is None or usage > 1.0 or not running:
        return 0.0
    wanted = prompt_tokens - candidate.matched_tokens
    wanted += endpoint.backlog.tokens(now, endpoint.rates.prefill_at(now))  # type: ignore[assignment]
    short = wanted - (1.0 - usage) * room
    if short <= 0.0:
        return 0.0
    freed = usage * room / running
    return min(short / freed, running) if freed > 0.0 else 0.0


def _blend(column: list[float | None], candidates: Sequence[Candidate], now: float) -> list[float]:
    trusts = [
        0.0 if value is None else candidate.endpoint.trust(now)
        for value, candidate in zip(column, candidates, strict=True)
    ]
    if all(trust == 1.0 for trust in trusts):
        return [value or 0.0 for value in column]
    total = sum(trusts)
    if total <= 0.0:
        return [0.0] * len(column)
    mean = sum((value or 0.0) * trust for value, trust in zip(column, trusts, strict=True)) / total
    return [
        (value or 0.0) * trust + mean * (1.0 - trust) for value, trust in zip(column, trusts, strict=True)
    ]
