"""All releases: which version a request gets, what its ending tells, time, and orders of operators.

Rules of this file:

- a tester who names a version of the pool in the pin header gets it, in any state; such requests, and those that got another
  version than the split chose (no usable endpoint, or none with room), are no evidence;
- a pool without a release has no say here (``None``): the weights of routes, or nothing, split its versions;
- a release whose plan keeps its identity over a reload goes on; any other plan begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from extproc.ledger import Lease, Settlement
from extproc.outcome import Outcome
from extproc.release.plan import Plan
from extproc.release.rollout import Event, Refused, Rollout, State
from extproc.release.split import version_at


class Releases:
    """``on_event`` hears of every change. ``available`` says whether a version of a pool has an endpoint."""

    def __init__(
        self,
        available: Callable[[str, str], bool],
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self._available = available
        self._on_event = on_event
        self._saved: Mapping[str, object] = {}

    def install(self, plans: Iterable[Plan]) -> None:
        """Take over a configuration."""
        wanted: dict[str, Rollout] = {}
        for plan in plans:
            running = self.rollouts.get(plan.pool)
            if running is None or running.plan.identity != plan.identity:
                wanted[plan.pool] = self._restored(plan)
                continue
            running.go_on_with(plan)
            wanted[plan.pool] = running
        self.rollouts = wanted

    def version_for(self, pool: str, key: str, headers: Mapping[str, str]) -> tuple[str, str] | None:
        """(version, arm) of a request: ``key`` is its session, or else something of its own. The arm is what the ending
        is counted for, empty for a pinned request. None: the pool has no release."""
        rollout = self.rollouts.get(pool)
        if rollout is None:
            return None
        plan = rollout.plan
        pinned = headers.get(plan.pin_header, "") if plan.pin_header else ""
        if pinned and (pinned in (plan.baseline, plan.candidate) or self._available(pool, pinned)):
            return pinned, ""
        version = version_at(plan, rollout.share, key)
        return version, version

    def settled(self, settlement: Settlement) -> None:
        """A request ended."""
        lease = settlement.lease
        if not lease.arm or lease.arm != lease.version:
            return
        rollout = self.rollouts.get(lease.pool)
        if rollout is None or lease.arm not in (rollout.plan.baseline, rollout.plan.candidate):
            return
        failed = settlement.outcome is Outcome.FAILURE or lease.blamed is not None
        if settlement.outcome is Outcome.NEUTRAL and not failed:
            return
        ttft_s = settlement.end.ttft_s if settlement.end is not None and lease.stream and not failed else None
        rollout.watch.request(candidate=lease.arm == rollout.plan.candidate, failed=failed, ttft_s=ttft_s)

    def on_trial(self, lease: Lease) -> bool:
        """Whether this request went to a candidate that has not been found good yet."""
        rollout = self.rollouts.get(lease.pool) if lease.arm else None
        if rollout is None or rollout.state is State.COMPLETE:
            return False
        return lease.version == rollout.plan.candidate

    def score(self, pool: str, version: str, value: float) -> None:
        """A quality score of one answer of a version; higher is better. Raises :class:`Refused`."""
        rollout = self.rollout(pool)
        if version not in (rollout.plan.baseline, rollout.plan.candidate):
            known = f"{rollout.plan.baseline} and {rollout.plan.candidate}"
            raise Refused(f"version {version!r} is not part of this release, which is of {known}")
        rollout.watch.score(candidate=version == rollout.plan.candidate, value=value)

    def tick(self, now: float) -> None:
        """Once a second or so."""
        for rollout in self.rollouts.values():
            event = rollout.tick(now, available=self._available(rollout.plan.pool, rollout.plan.candidate))
            if event is not None:
                self._on_event(event)

    def order(self, pool: str, word: str, reason: str = "") -> Event:
        """``pause``, ``promote`` or ``rollback`` by an operator. Raises :class:`Refused`."""
        rollout = self.rollout(pool)
        if word == "pause":
            event = rollout.pause()
        elif word == "promote":
            event = rollout.promote()
        elif word == "rollback":
            event = rollout.rollback(reason)
        else:
            raise Refused(f"{word!r} is no order; there are pause, promote, rollback")
        self._on_event(event)
        return event

    def rollout(self, pool: str) -> Rollout:
        """The release of a pool. Raises :class:`Refused` when there is none."""
        found = self.rollouts.get(pool)
        if found is None:
            known = ", ".join(sorted(self.rollouts)) or "none"
            raise Refused(f"pool {pool!r} has no release; pools with one: {known}")
        return found

    def report(self) -> list[dict[str, object]]:
        """For people, by pool."""
        return [_row(rollout) for _, rollout in sorted(self.rollouts.items())]

    def dump(self) -> dict[str, object]:
        """What must survive a restart."""
        return {pool: rollout.dump() for pool, rollout in self.rollouts.items()}

    def load(self, saved: Mapping[str, object]) -> None:
        """Remember what :meth:`dump` gave before a restart; used by the next :meth:`install`."""
        self._saved = dict(saved)

    def _restored(self, plan: Plan) -> Rollout:
        rollout = Rollout(plan)
        saved = self._saved.get(plan.pool)
        if isinstance(saved, Mapping):
            try:
                rollout.load(saved)
            except (KeyError, TypeError, ValueError):
                return Rollout(plan)
        return rollout


def _row(rollout: Rollout) -> dict[str, object]:
    plan = rollout.plan
    step = plan.steps[rollout.step]
    return {
        "pool": plan.pool,
        "baseline": plan.baseline,
        "candidate": plan.candidate,
        "state": rollout.state.value,
        "share": rollout.share,
        "step": rollout.step + 1,
        "steps": [{"share": step.share, "hold_s": step.hold_s} for step in plan.steps],
        "held_s": round(rollout.held_s, 1),
        "hold_s": step.hold_s,
        "samples": rollout.samples,
        "min_samples": plan.guards.min_samples,
        "reason": rollout.reason,
        "seen": rollout.watch.report(),
    }
