"""Health of one endpoint: a circuit that opens on failures and closes by trial, and a short rest for busy engines.

    state     | event                                             | next      | for how long
    ----------+---------------------------------------------------+-----------+------------------------------------
    closed    | ``failures`` failures in a row: attempts that     | open      | ``backoff_s``, twice as long each
              | broke, or scrapes that were refused               |           | time, at most ``max_backoff_s``
    closed    | more than ``error_share`` of the outcomes of      | open      | ``open_s``, twice as long each
              | ``window_s`` failed, ``min_samples`` at least     |           | time, at most ``max_open_s``
    closed    | scrapes time out, and the engine has answered     | open      | until a scrape is answered
              | nothing for ``silence_s``                         |           |
    open      | its time is over                                  | half-open |
    open      | a scrape is answered, if it opened because        | half-open |
              | nothing listened or nothing was answered          |           |
    open      | the engine restarted                              | half-open |
    half-open | a success                                         | half-open | 1, then 2, then 4 … requests at once
    half-open | ``probation`` successes, or ``probation_s``       | closed    |
              | without a failure                                 |           |
    half-open | a failure                                         | open      | longer than the last time

Rules of this file:

- neutral outcomes (the client's faults, clients that leave) move nothing;
- an engine that says it is busy (503, 429) is alive: it moves no circuit. After ``busy_row`` such answers in a row it gets
  no new requests for ``busy_backoff_s``, twice as long each time, at most ``max_busy_backoff_s``; a success ends that.
  An engine that refuses has no queue, and without this rest would look like the fastest of all;
- connections that cannot be made count in the row, not in the share: they say that nothing is there, and cost no client
  anything, so the short back-off is enough;
- failures of requests already under way when the circuit opened do not add up;
- a circuit that stayed closed for ``window_s`` has forgotten how often it opened for its share of errors;
- whether the last endpoint of a pool may be left out is not known here: see :mod:`extproc.scheduling.eligible`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from extproc.fleet.failures import FailureWindow

_MOST_DOUBLINGS = 16


class Circuit(StrEnum):
    """See the table at the head of this file."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Why(StrEnum):
    """Why a circuit opened last."""

    NEVER = ""
    FAILURES = "failures"
    """Attempts broke, in a row."""
    CONNECT = "connect"
    """Connections could not be made, in a row, or scrapes were refused."""
    ERRORS = "errors"
    """The share of failures."""
    SILENT = "silent"
    """Neither scrapes nor requests are answered."""


@dataclass(slots=True, frozen=True)
class HealthPolicy:
    """Bounds of all endpoints, as configured. Times in seconds."""

    failures: int = 3
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    error_share: float = 0.1
    window_s: float = 120.0
    min_samples: int = 20
    open_s: float = 180.0
    max_open_s: float = 1800.0
    silence_s: float = 5.0
    probation: int = 3
    probation_s: float = 30.0
    busy_row: int = 2
    busy_backoff_s: float = 0.5
    max_busy_backoff_s: float = 5.0
    queue_share: float = 0.9
    """Of ``max_concurrency``: an engine with more waiting requests gets no further ones while others have room."""
    max_ejection: float = 0.5
    """Share of a pool that may be left out for errors, busy answers or on trial at once."""


class Health:
    """Circuit of one endpoint. ``now`` is monotonic seconds everywhere."""

    __slots__ = (
        "_busy_rests",
        "_busy_row",
        "_closed_at",
        "_error_openings",
        "_heard_at",
        "_policy",
        "_row_openings",
        "_window",
        "busy_until",
        "excluded_until",
        "failures",
        "opened",
        "trials_left",
        "unreachable",
        "why",
    )

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._window = FailureWindow(self._policy.window_s)
        self.failures = 0
        """Failures in a row."""
        self.excluded_until = 0.0
        self.busy_until = 0.0
        self.trials_left = 0
        """Successes still wanted before the circuit closes; 0 when it is closed."""
        self.unreachable = False
        """Open because nothing listened or nothing was answered: an answer ends it."""
        self.why = Why.NEVER
        self.opened = 0
        """How often the circuit opened since we know the endpoint."""
        self._row_openings = 0
        self._error_openings = 0
        self._closed_at = 0.0
        self._busy_row = 0
        self._busy_rests = 0
        self._heard_at: float | None = None

    @property
    def policy(self) -> HealthPolicy:
        """The bounds in force; setting others keeps the state."""
        return self._policy

    @policy.setter
    def policy(self, policy: HealthPolicy) -> None:
        if policy.window_s != self._policy.window_s:
            self._window = FailureWindow(policy.window_s)
        self._policy = policy
        self.trials_left = min(self.trials_left, policy.probation)

    def evident(self, now: float) -> bool:
        """Whether the circuit is not closed on evidence that nothing there answers, which no share of a pool bounds."""
        if self.why is not Why.CONNECT and self.why is not Why.SILENT:
            return False
        return now < self.excluded_until or self._on_probation(now)

    def failed(self, now: float, *, connect: bool = False, unreachable: bool = False) -> None:
        """Count one failure. ``connect``: no connection could be made. ``unreachable``: a scrape was refused."""
        self.failures += 1
        self.unreachable = self.unreachable or unreachable
        if now < self.excluded_until:
            return
        policy, there = self._policy, not (connect or unreachable)
        if there:
            self._window.add(now, failed=True)
            self._heard_at = now
        trial = self._on_probation(now)
        failed, outcomes = self._window.counts(now) if there else (0, 0)
        if (outcomes >= policy.min_samples and failed > policy.error_share * outcomes) or (
            trial and self.why is Why.ERRORS and there
        ):
            if not trial and now - max(self._closed_at, self.excluded_until) > policy.window_s:
                self._error_openings = 0
            self._open(now, _grown(policy.open_s, self._error_openings, policy.max_open_s), Why.ERRORS)
            self._error_openings = min(self._error_openings + 1, _MOST_DOUBLINGS)
            self._window.clear()
        elif self.failures >= policy.failures or trial:
            span = _grown(policy.backoff_s, self._row_openings, policy.max_backoff_s)
            self._open(now, span, Why.FAILURES if there else Why.CONNECT)
            self._row_openings = min(self._row_openings + 1, _MOST_DOUBLINGS)

    def succeeded(self, now: float) -> None:
        """Count one served request."""
        self._heard_at = now
        if now < self.excluded_until:
            return
        self._window.add(now, failed=False)
        self.failures = 0
        self._busy_row = self._busy_rests = 0
        self.busy_until = 0.0
        if self.trials_left > 1:
            self.trials_left -= 1
        elif self.trials_left or self._row_openings:
            self._close(now)

    def busied(self, now: float) -> None:
        """The engine said that it is busy."""
        self._heard_at = now
        if now < self.busy_until:
            return
        self._busy_row += 1
        if self._busy_row >= self._policy.busy_row:
            policy = self._policy
            self.busy_until = now + _grown(policy.busy_backoff_s, self._busy_rests, policy.max_busy_backoff_s)
            self._busy_rests = min(self._busy_rests + 1, _MOST_DOUBLINGS)

    def heard(self, now: float) -> None:
        """The engine gave a sign of life that says nothing else."""
        self._heard_at = now

    def answered(self, now: float) -> None:
        """The endpoint answered a scrape: if it only could not be reached, it may be tried again now."""
        self._heard_at = now
        if self.unreachable:
            self.unreachable = False
            self.failures = 0
            self.excluded_until = min(self.excluded_until, now)

    def timed_out(self, now: float) -> None:
        """A scrape got no answer in time. Long enough without any other sign of life, that is a stuck engine."""
        if self._heard_at is None:
            self._heard_at = now
        if now - self._heard_at < self._policy.silence_s:
            return
        if now >= self.excluded_until:
            self._open(now, 0.0, Why.SILENT)
        if self.why is Why.SILENT:
            self.unreachable = True
            self.excluded_until = max(self.excluded_until, now + self._policy.silence_s)

    def restarted(self, now: float) -> None:
        """The engine is a new process: what the old one did no longer counts, but trust has to be earned."""
        self._window.clear()
        self.failures = 0
        self.unreachable = False
        self._busy_row = self._busy_rests = 0
        self.busy_until = 0.0
        self.excluded_until = min(self.excluded_until, now)

    def state(self, now: float) -> Circuit:
        """Where the circuit stands."""
        if now < self.excluded_until:
            return Circuit.OPEN
        return Circuit.HALF_OPEN if self._on_probation(now) else Circuit.CLOSED

    def excluded(self, now: float) -> bool:
        """Whether the circuit is open."""
        return now < self.excluded_until

    def blocked_until(self) -> float:
        """When new requests may come again, as far as time alone decides."""
        return max(self.excluded_until, self.busy_until)

    def error_share(self, now: float) -> float | None:
        """Share of failures in the window; None without outcomes."""
        failed, outcomes = self._window.counts(now)
        return failed / outcomes if outcomes else None

    def admits(self, now: float, leases: int) -> bool:
        """Whether one more request may go here beside ``leases`` open ones."""
        if now < self.excluded_until or now < self.busy_until:
            return False
        if not self.trials_left:
            return True
        return not self._on_probation(now) or leases < 1 << (self._policy.probation - self.trials_left)

    def _open(self, now: float, span_s: float, why: Why) -> None:
        self.excluded_until = now + span_s
        self.trials_left = self._policy.probation
        self.why = why
        self.opened += 1

    def _close(self, now: float) -> None:
        self.trials_left = 0
        self._row_openings = 0
        self._closed_at = now

    def _on_probation(self, now: float) -> bool:
        if self.trials_left and now >= self.excluded_until + self._policy.probation_s:
            self._close(now)
        return self.trials_left > 0


def _grown(first_s: float, times: int, most_s: float) -> float:
    return min(first_s * 2.0**times, most_s)
