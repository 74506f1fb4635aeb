"""One release as a state machine. Time comes as ``now`` in monotonic seconds, and is kept as time spent, not as dates.

    state       | event                                           | share              | next
    ------------+-------------------------------------------------+--------------------+------------
    WAITING     | tick: the candidate has an endpoint             | first step         | RUNNING
    RUNNING     | tick: a guard is broken                         | 0                  | ROLLED_BACK
    RUNNING     | tick: held long enough, enough samples          | next step          | RUNNING
    RUNNING     | the same at the last step, or it is 100 %       | 100 %              | COMPLETE
    RUNNING     | pause                                           | stays              | PAUSED
    RUNNING     | promote                                         | next step          | RUNNING
    PAUSED      | tick: a guard is broken                         | 0                  | ROLLED_BACK
    PAUSED      | promote                                         | stays: goes on     | RUNNING
    ROLLED_BACK | promote                                         | first step, anew   | RUNNING
    any         | rollback                                        | 0                  | ROLLED_BACK
    COMPLETE    | anything else                                   | 100 %              | COMPLETE

A step of 100 % leaves no baseline to compare with, so it completes the release at once. Rolling back takes one step,
whatever the share. Whatever comes up that is not in the table changes nothing and is refused with a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from extproc.release.plan import Plan, Step
from extproc.release.watch import Watch


class State(StrEnum):
    """Where a release stands; see the head of this file."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETE = "complete"
    ROLLED_BACK = "rolled_back"


@dataclass(slots=True, frozen=True)
class Event:
    """Something happened to a release. ``kind``: started, step, paused, resumed, completed, rolled_back."""

    pool: str
    baseline: str
    candidate: str
    kind: str
    by: str
    """plan, guard or operator."""
    share_before: float
    share: float
    reason: str = ""


class Refused(Exception):
    """The release is in no state for this; the text is for people."""


class Rollout:
    """See the table above."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state = State.WAITING
        self.step = 0
        self.held_s = 0.0
        """Time spent at this step."""
        self.reason = ""
        """Why it was rolled back."""
        self.watch = Watch(plan.guards)
        self._seen_before = 0
        self._ticked_at: float | None = None

    @property
    def share(self) -> float:
        """Share of the clients that get the candidate."""
        if self.state in (State.WAITING, State.ROLLED_BACK):
            return 0.0
        return 1.0 if self.state is State.COMPLETE else self.plan.steps[self.step].share

    @property
    def samples(self) -> int:
        """Requests of the candidate judged in this step."""
        return self.watch.seen[True] - self._seen_before

    def tick(self, now: float, *, available: bool) -> Event | None:
        """Once a second or so; ``available``: the candidate has an endpoint."""
        spent = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if self.state is State.WAITING:
            return self._begin("plan") if available else None
        if self.state not in (State.RUNNING, State.PAUSED):
            return None
        breach = self.watch.tick(now)
        if breach is not None:
            return self._back("guard", f"{breach.guard}: {breach.text}")
        if self.state is State.PAUSED:
            return None
        self.held_s += spent
        enough = self.samples >= self.plan.guards.min_samples
        if self.held_s >= self._step.hold_s and enough:
            return self._forward("plan")
        return None

    def go_on_with(self, plan: Plan) -> None:
        """The same release with other details; other guards begin to watch anew, and the step's samples with them."""
        if plan.guards != self.plan.guards:
            self.watch = Watch(plan.guards)
            self._seen_before = 0
        self.plan = plan

    def pause(self) -> Event:
        """Keep the share; the guards go on watching. Raises :class:`Refused`."""
        if self.state is not State.RUNNING:
            raise Refused(f"the release is {self.state.value}, only a running one can be paused")
        self.state = State.PAUSED
        return self._event("paused", "operator", self.share)

    def promote(self) -> Event:
        """The next step now, whatever the samples say. Raises :class:`Refused`."""
        if self.state is State.RUNNING:
            return self._forward("operator")
        if self.state is State.PAUSED:
            self.state = State.RUNNING
            return self._event("resumed", "operator", self.share)
        if self.state is State.ROLLED_BACK:
            self.watch = Watch(self.plan.guards)
            return self._begin("operator")
        raise Refused(f"the release is {self.state.value}, there is nothing to promote")

    def rollback(self, reason: str = "") -> Event:
        """Nobody gets the candidate any more. Raises :class:`Refused`."""
        if self.state is State.ROLLED_BACK:
            raise Refused("the release is rolled back already")
        return self._back("operator", reason or "by hand")

    def dump(self) -> dict[str, object]:
        """What must survive a restart."""
        return {
            "identity": self.plan.identity,
            "state": self.state.value,
            "step": self.step,
            "held_s": self.held_s,
            "samples": self.samples,
            "reason": self.reason,
            "watch": self.watch.dump(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`dump` was taken, if it is of the same release; anything else is left alone.

        Raises:
            KeyError, TypeError, ValueError: this is no dump.
        """
        if saved["identity"] != self.plan.identity:
            return
        state, step = State(str(saved["state"])), int(saved["step"])
        if not 0 <= step < len(self.plan.steps):
            raise ValueError(step)
        self.watch.load(saved["watch"])
        self.state, self.step = state, step
        self.held_s, self.reason = float(saved["held_s"]), str(saved["reason"])
        self._seen_before = self.watch.seen[True] - int(saved["samples"])

    @property
    def _step(self) -> Step:
        return self.plan.steps[self.step]

    def _begin(self, by: str) -> Event:
        before = self.share
        self.state, self.reason = State.RUNNING, ""
        self._enter(0)
        return self._arrived("started", by, before)

    def _forward(self, by: str) -> Event:
        before = self.share
        if self.step + 1 < len(self.plan.steps):
            self._enter(self.step + 1)
            return self._arrived("step", by, before)
        self.state = State.COMPLETE
        return self._event("completed", by, before)

    def _arrived(self, kind: str, by: str, before: float) -> Event:
        if self._step.share >= 1.0:
            self.state = State.COMPLETE
            kind = "completed"
        return self._event(kind, by, before)

    def _back(self, by: str, reason: str) -> Event:
        before = self.share
        self.state, self.reason = State.ROLLED_BACK, reason
        return self._event("rolled_back", by, before, reason)

    def _enter(self, step: int) -> None:
        self.step, self.held_s = step, 0.0
        self._seen_before = self.watch.seen[True]

    def _event(self, kind: str, by: str, before: float, reason: str = "") -> Event:
        plan = self.plan
        return Event(plan.pool, plan.baseline, plan.candidate, kind, by, before, self.share, reason)
