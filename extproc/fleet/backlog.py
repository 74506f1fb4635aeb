"""Prompts given to one endpoint and not yet prefilled, as far as we know, in units of work
(:mod:`extproc.fleet.prefill`).

Rules of this file:

- ``add`` at the decision, ``remove`` when the lease's first token is known to have come or the lease ended;
- we hear of a first token late (with the record of the request's end), so between events the backlog leaks at
  the endpoint's prefill rate, and every scrape corrects it;
- a scrape's first-token counter says how many leases have started. Engines prefill in order of arrival, so
  these are the oldest; what the younger ones brought is the most that can be left, and that without the part
  an engine may have computed of the next one is the least: the leaked level is moved into these bounds;
- engines may show numbers that are seconds old. The ends of requests tell when their first tokens really came;
  how much later scrapes showed them, beyond half an interval, is the counters' ``lag``, and what the engine can
  have done in that time is no longer bound by them;
- while an engine stands still (:mod:`extproc.fleet.standstill`) nothing leaks;
- an engine that counts computed prompt tokens but no first tokens bounds the level in the same way, by
  tokens;
- a counter that stands still while requests end here is not believed. Without counters the level is
  ``estimated``;
- it is never below zero and never above what open, unstarted leases can explain (``charged``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from extproc.engines.state import EngineState
from extproc.fleet.counters import growth

STEP_TOKENS = 8192.0
"""Tokens an engine may have computed of prompts that its counters do not show yet: what vLLM puts into one step
on large GPUs (``max_num_batched_tokens``). The leak is good for a second; a bound that is too tight is not."""
_FROZEN_AFTER = 3
_MEMORY = 16
_MOST_LAG_S = 30.0


@dataclass(slots=True)
class Backlog:
    """Tokens waiting to be prefilled. Times are monotonic seconds, rates tokens per second."""

    charged: float = 0.0
    """Uncached tokens of leases whose first token has not come, as far as we know."""
    level: float = 0.0
    """Estimate of what is still to prefill, at ``at``."""
    at: float = 0.0
    estimated: bool = True
    """No counter of the engine stands behind the level."""
    _waiting: deque[float] = field(default_factory=deque)
    """Charges of unstarted leases, oldest first."""
    largest: float = 0.0
    """The most work of one lease that the newest scrape, or an end since the one before, showed as done."""
    lag: float = 0.0
    """Seconds that the engine's counters are behind, as far as we know."""
    _started: dict[float, deque[float]] = field(default_factory=dict)
    """Charge -> when scrapes said that such leases have started, which ``remove`` has yet to take away."""
    _scraped_at: float = float("-inf")
    _gap: float = 1.0
    """Seconds between scrapes, the mean of late."""
    _bound: float = 0.0
    """Most that can be left by the computed-tokens counter."""
    _unleaked: float = 0.0
    """The level of the scrape before with what has come since: what is left of an engine that stood still."""
    _ended: int = 0
    """Leases removed since the last scrape before a counter showed their first token."""
    _mean_work: float = 1.0
    _mean_tokens: float = 1.0
    _largest: float = 0.0
    _unseen: int = 0
    """Such leases that no counter growth has explained yet."""

    @property
    def unstarted(self) -> int:
        """Open leases whose first token has not come, as far as we know."""
        return len(self._waiting)

    def tokens(self, now: float, rate: float) -> float:
        """The level at ``now``, leaked at ``rate``."""
        level = self.level
        if level <= 0.0:
            return 0.0
        if now > self.at:
            level -= (now - self.at) * rate
            if level <= 0.0:
                return 0.0
        return level if level < self.charged else self.charged

    def waiting(self, level: float) -> float:
        """How many of the unstarted leases really wait, if this much work is left."""
        return len(self._waiting) * level / self.charged if self.charged > 0.0 else 0.0

    @property
    def per_token(self) -> float:
        """Work that an uncached token meant of late."""
        return self._mean_work / self._mean_tokens

    def add(self, work: float, now: float, rate: float, tokens: float | None = None) -> None:
        """A request with this much work was decided for the endpoint; ``tokens``: its uncached tokens, if that
        is not the same."""
        work = max(work, 0.0)
        self._mean_work += (work - self._mean_work) / _MEMORY
        self._mean_tokens += (max(work if tokens is None else tokens, 1.0) - self._mean_tokens) / _MEMORY
        self.level = self.tokens(now, rate) + work
        self._waiting.append(work)
        self.charged += work
        self._bound += work
        self._unleaked += work
        self.at = max(now, self.at)

    def remove(self, tokens: float, now: float, rate: float, started_at: float | None = None) -> None:
        """A lease's first token came (at ``started_at``, where known), or it ended without one: its tokens no longer
        wait.

        Leases with equal charges are interchangeable here: if a scrape has said that one of them started, it
        is taken to be this one.
        """
        tokens = max(tokens, 0.0)
        shown = self._started.get(tokens)
        if shown:
            shown_at = shown.popleft()
            if not shown:
                del self._started[tokens]
            if started_at is not None:
                self._learn_lag(shown_at - started_at)
        elif tokens in self._waiting:
            if started_at is not None and self._scraped_at > started_at:
                self._learn_lag(self._scraped_at - started_at)
            self._waiting.remove(tokens)
            self._largest = max(self._largest, tokens)
            self._ended += 1
            self._lower(tokens)
        self.level = self.tokens(now, rate)
        self.at = max(now, self.at)

    def observe(
        self,
        state: EngineState,
        previous: EngineState | None,
        now: float,
        rate: float,
        *,
        still: bool = False,
    ) -> None:
        """Correct the level by what the engine's counters grew since the scrape before; ``still``: it did nothing."""
        leaked = min(self._unleaked, self.charged) if still else self.tokens(now, rate)
        if 0.0 < now - self._scraped_at < 60.0:
            self._gap += (now - self._scraped_at - self._gap) / _MEMORY
        self._scraped_at = now
        done_since = self.lag * rate
        first = growth(previous, state, "first_tokens_total")
        computed = growth(previous, state, "computed_prompt_tokens_total")
        ended, self._ended = self._ended, 0
        self.largest, self._largest = self._largest, 0.0
        self.estimated = True
        least, most = 0.0, self.charged
        if first is not None:
            shown = int(first)
            self._unseen = 0 if shown else self._unseen + ended
            if self._unseen < _FROZEN_AFTER:
                self.estimated = False
                self._start(shown - ended, now)
                most = self.charged
                head = self._waiting[0] if self._waiting else 0.0
                least = max(most - max(head, STEP_TOKENS * self.per_token) - done_since, 0.0)
        elif computed is not None:
            self._unseen = 0 if computed else self._unseen + ended
            if self._unseen < _FROZEN_AFTER:
                self.estimated = False
                self._bound = min(max(self._bound - computed * self.per_token, 0.0), self.charged)
                most = self._bound
                least = max(most - STEP_TOKENS * self.per_token - done_since, 0.0)
        self.level = self._unleaked = min(max(leaked, least), most)
        self.at = max(now, self.at)

    def _start(self, leases: int, now: float) -> None:
        for _ in range(min(leases, len(self._waiting))):
            tokens = self._waiting.popleft()
            self.largest = max(self.largest, tokens)
            self._started.setdefault(tokens, deque()).append(now)
            self._lower(tokens)

    def _lower(self, tokens: float) -> None:
        # Sums of floats drift; an empty queue is exactly nothing.
        self.charged = max(self.charged - tokens, 0.0) if self._waiting else 0.0
        self._bound = min(self._bound, self.charged)

    def _learn_lag(self, late_s: float) -> None:
        """A scrape showed a first token so many seconds after it came. Fresh counters: half an interval."""
        self.lag += (min(late_s, _MOST_LAG_S) - self._gap / 2 - self.lag) / _MEMORY
        self.lag = max(self.lag, 0.0)
