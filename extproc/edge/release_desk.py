"""Releases and shadow traffic at the edge: what the core says goes to log, metrics, webhook and disk; copies get endpoints.

Rules of this file:

- the state of all releases is written within ``_SAVE_SOON_S`` of an event, and every ``_SAVE_EVERY_S``, in a thread;
- a webhook that is slow or away holds up nothing;
- a copy is placed like any request of its pool, but waits in no queue and counts for no tenant's limits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

from extproc.admission.decision import Decision
from extproc.admission.ticket import Ticket
from extproc.api.request import InferenceRequest
from extproc.config.release_plans import release_plans, shadow_plans
from extproc.config.schema import Settings
from extproc.core import Core
from extproc.edge.release_state import ReleaseState
from extproc.edge.webhook import Webhook, WebhookSettings
from extproc.release.rollout import Event
from extproc.release.shadow import ShadowPlan
from extproc.routing.match import Match
from extproc.routing.rejection import Rejection, no_capacity
from extproc.routing.route import Route, RouteMatch
from extproc.routing.tenant import Tenant

log = logging.getLogger(__name__)

SHADOW = "x-gateway-shadow"
SHADOW_CLUSTER = "shadow"
"""Name of the cluster that leads to Envoy's own shadow listener."""
_TIMEOUT_MS = "x-envoy-upstream-rq-timeout-ms"
_SAVE_SOON_S = 1.0
_SAVE_EVERY_S = 10.0


class ReleaseDesk:
    """One for a process; ``core`` is complete when :meth:`restore` is called."""

    def __init__(
        self, core: Core, settings: Settings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.events: dict[tuple[str, str, str], int] = {}
        """(pool, kind, by) -> count, for the metrics."""
        self.webhook: Webhook | None = None
        said = settings.releases
        if said.webhook is not None:
            token_file = said.webhook_token_file
            token = token_file.read_text().strip() if token_file is not None else None
            self.webhook = Webhook(
                WebhookSettings(said.webhook, token, said.webhook_timeout, said.webhook_attempts)
            )
        self._core = core
        self._clock = clock
        self._state = ReleaseState(settings.state_dir)
        self._happened = asyncio.Event()

    def restore(self) -> None:
        """Read what the last process left."""
        self._core.releases.load(self._state.read())

    def install(self, settings: Settings) -> None:
        """Take over a configuration."""
        self._core.releases.install(release_plans(settings))
        self._core.shadows.install(shadow_plans(settings), self._clock())

    def happened(self, event: Event) -> None:
        """A release changed."""
        key = (event.pool, event.kind, event.by)
        self.events[key] = self.events.get(key, 0) + 1
        level = logging.WARNING if event.kind == "rolled_back" else logging.INFO
        log.log(level, "release", extra=asdict(event))
        if self.webhook is not None:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.webhook.tell({"at": at, "release": asdict(event)})
        self._happened.set()

    async def run(self) -> None:
        """Save, and send to the webhook, for ever; ends by cancellation."""
        sending = asyncio.create_task(self.webhook.run()) if self.webhook is not None else None
        try:
            while True:
                try:
                    async with asyncio.timeout(_SAVE_EVERY_S):
                        await self._happened.wait()
                    await asyncio.sleep(_SAVE_SOON_S)
                except TimeoutError:
                    pass
                self._happened.clear()
                await self.save()
        finally:
            if sending is not None:
                sending.cancel()

    async def save(self) -> None:
        """Write the state of all releases."""
        state = self._core.releases.dump()
        if state or self._state.path.exists():
            await asyncio.to_thread(self._state.write, state)

    def words(self, request: InferenceRequest, decision: Decision) -> tuple[tuple[str, str], ...]:
        """Headers that have Envoy copy this request, if it is to be."""
        if not request.api.generates:
            return ()
        key = request.session or request.user or request.id
        ordered = self._core.shadows.order(decision.pool.name, request.id, key, self._clock())
        return ((SHADOW, SHADOW_CLUSTER),) if ordered else ()

    async def decide_copy(
        self, request: InferenceRequest, tenant: Tenant, hold: object
    ) -> Decision | Rejection:
        """An endpoint for a copy."""
        now = self._clock()
        plan = self._core.shadows.arrived(request.id)
        if plan is None:
            return Rejection(
                403, "invalid_request_error", "not_ordered", "This copy was not ordered.", "copy_not_ordered"
            )
        placed = self._placed(plan, request, tenant, now)
        if isinstance(placed, Rejection):
            self._core.shadows.refused(request.id, placed.reason)
            return placed
        placed.headers += ((_TIMEOUT_MS, str(round(plan.max_duration_s * 1000))),)
        return placed

    def _placed(
        self, plan: ShadowPlan, request: InferenceRequest, tenant: Tenant, now: float
    ) -> Decision | Rejection:
        dispatcher = self._core.dispatcher
        pool = dispatcher.router.pools.get(plan.target)
        if pool is None:
            return no_capacity(plan.target, "the pool is gone")
        wanted = plan.model or (pool.models[0] if pool.models else "")
        splice = wanted if wanted and wanted != request.model else None
        match = Match(pool, Route("shadow", RouteMatch(), pool.name), splice)
        placed = dispatcher.place(Ticket(request, tenant, now), match, now)
        return placed if placed is not None else no_capacity(pool.name, "all endpoints are full")
