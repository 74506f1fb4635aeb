"""Lets requests in: who asks, within which limits, now or after a wait. The core decides; clocks, events and the shared
store are here.

Rules of this file:

- a request that must wait asks Envoy once for its whole time (``hold``), then sleeps until the core answers;
- a client that leaves cancels the handler, which takes the ticket out of the queue in the same turn;
- while anything waits a timer polls the core; nothing runs while nothing waits;
- what must survive a restart (budgets of the day, learnt sizes) is written every few seconds in a thread, and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from extproc.admission.decision import Decision
from extproc.admission.rules import AdmissionRules
from extproc.api.request import InferenceRequest, RequestHead
from extproc.config import traffic
from extproc.config.snapshot import Snapshot
from extproc.core import Core
from extproc.edge.limit_state import load_state, save_state
from extproc.edge.limits_redis import RedisLimits
from extproc.limits.bucket import day_of
from extproc.limits.limiter import Reserved
from extproc.routing.identity import Identity
from extproc.routing.match import Router
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import Tenant

log = logging.getLogger(__name__)

Hold = Callable[[float], Awaitable[None]]
"""Tells Envoy to wait so many seconds for our answer."""

_SAVE_EVERY_S = 5.0
_MARGIN_S = 5.0
"""Beyond the deadline: the answer must still arrive."""
_EXTERNAL = "x-envoy-external-address"
_FORWARDED = "x-forwarded-for"


class Gatekeeper:
    """One for a process. ``snapshot`` gives the configuration that rules now."""

    def __init__(
        self,
        core: Core,
        snapshot: Callable[[], Snapshot],
        state_dir: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.identity = Identity()
        self.store: RedisLimits | None = None
        self.open_schedules: tuple[str, ...] = ()
        self._core = core
        self._snapshot = snapshot
        self._file = state_dir / "limits.json"
        self._saved: dict[str, Any] = {}
        self._clock = clock
        self._wall = wall
        self._timer: asyncio.TimerHandle | None = None
        self._by_client = False

    def restore(self) -> None:
        """Read what an earlier process knew."""
        load_state(self._file, self._core)

    def rules(self, snapshot: Snapshot) -> tuple[Router, AdmissionRules]:
        """Take over a configuration: routes and rules that hold at this time of day."""
        self.identity = snapshot.identity
        self.open_schedules = traffic.active(snapshot.settings, self._wall())
        self._core.admission.limiter.wall_offset = self._wall() - self._clock()
        said = snapshot.settings.rate_limits
        if said.store == "redis":
            if self.store is None or self.store.settings != said.redis:
                self._close_store()
                self.store = RedisLimits(said.redis, self._core.admission.limiter, self._clock)
        else:
            self._close_store()
        router, rules = snapshot.scheduled(self.open_schedules)
        self._by_client = bool(rules.limits.client)
        return router, rules

    def identify(self, head: RequestHead, metadata: Any) -> Tenant | Rejection:
        """Who asks. ``metadata`` is Envoy's metadata context, None where it sent none."""
        return self.identity.identify(head, self._plain(metadata))

    async def decide(self, request: InferenceRequest, tenant: Tenant, hold: Hold) -> Decision | Rejection:
        """The decision, at once or after a wait."""
        admission = self._core.admission
        client = client_address(request.head.headers) if self._by_client else ""
        reserved: Reserved | None = None
        if self.store is not None:
            granted = await self.store.reserve(admission.demand(request, tenant, client))
            if isinstance(granted, Rejection):
                return granted
            reserved = granted
        answered = asyncio.Event()
        now = self._clock()
        ticket = admission.submit(request, now, tenant, answered.set, client=client, reserved=reserved)
        if ticket.answer is None:
            try:
                self._arm()
                await hold(ticket.deadline - now + _MARGIN_S)
                await answered.wait()
            except BaseException:
                admission.cancel(ticket, self._clock())
                if isinstance(ticket.answer, Decision):
                    # Answered in the very turn in which the client left: it reaches no engine.
                    self._core.ledger.drop(request.id, self._clock())
                raise
        assert ticket.answer is not None
        return ticket.answer

    def capacity_changed(self) -> None:
        """A scrape came in: perhaps there is room."""
        if self._core.admission.waiting:
            self._core.admission.poll(self._clock())

    async def run(self) -> None:
        """Schedules and state, for ever; ends by cancellation."""
        due = self._clock() + _SAVE_EVERY_S
        while True:
            await asyncio.sleep(1.0)
            self._core.admission.limiter.wall_offset = self._wall() - self._clock()
            self._follow_schedules()
            if self._clock() >= due:
                due = self._clock() + _SAVE_EVERY_S
                await self.save()

    async def save(self) -> None:
        """Write the state down if it has changed."""
        self._saved = await asyncio.to_thread(
            save_state, self._file, snapshot_of_state(self._core, self._wall()), self._saved
        )

    async def close(self) -> None:
        """Save, and end the connection to the store."""
        if self._timer is not None:
            self._timer.cancel()
        await self.save()
        if self.store is not None:
            await self.store.close()

    def _follow_schedules(self) -> None:
        snapshot = self._snapshot()
        names = traffic.active(snapshot.settings, self._wall())
        if names != self.open_schedules:
            router, rules = self.rules(snapshot)
            self._core.rule(router, rules, self._clock())
            log.info("schedules changed", extra={"open": list(names)})

    def _arm(self) -> None:
        if self._timer is not None:
            return
        now = self._clock()
        due = self._core.admission.next_wakeup(now)
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(due - now, 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._core.admission.poll(self._clock())
        except Exception:
            log.exception("the queue could not be polled")
        self._arm()

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close_soon()
            self.store = None

    def _plain(self, metadata: Any) -> Mapping[str, object]:
        wanted = self.identity.namespaces
        if metadata is None or not wanted:
            return {}
        found = metadata.filter_metadata
        return {name: MessageToDict(found[name]) for name in wanted if name in found}


def snapshot_of_state(core: Core, wall: float) -> dict[str, Any]:
    """What survives a restart, as plain values: taken on the loop, written in a thread."""
    return {
        "days": core.admission.limiter.used_today(day_of(wall)),
        "replies": core.admission.sizes.state(),
        "models": core.models.state(),
        "speeds": core.speeds(),
    }


def client_address(headers: Mapping[str, str]) -> str:
    """The client's address as Envoy saw it: its own header, else the last hop that it appended."""
    return headers.get(_EXTERNAL) or headers.get(_FORWARDED, "").rpartition(",")[2].strip()
