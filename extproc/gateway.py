"""Builds the parts from a configuration and wires them: the one place that knows everybody."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from extproc.admission.dispatcher import Decision
from extproc.admission.report import queue_report
from extproc.api.request import InferenceRequest
from extproc.config.address import parse_address
from extproc.config.load import load
from extproc.config.schema import Settings
from extproc.config.snapshot import Snapshot
from extproc.core import Core
from extproc.edge.access_log import AccessLogServicer
from extproc.edge.admin import AdminParts, build_admin
from extproc.edge.answers import Answers
from extproc.edge.engine_access import EngineAccess
from extproc.edge.envoy_admin import EnvoyAdmin
from extproc.edge.ext_proc import ExtProcServicer, StreamLimits
from extproc.edge.gatekeeper import Gatekeeper, Hold
from extproc.edge.grpc_server import GrpcServer
from extproc.edge.guard_ticket import GUARD, ticket_for
from extproc.edge.http_server import HttpServer
from extproc.edge.journal import Journal
from extproc.edge.knowledge import Knowledge
from extproc.edge.live_config import LiveConfig
from extproc.edge.logs import Logs
from extproc.edge.loop_lag import LoopLag
from extproc.edge.own_answers import OwnAnswers
from extproc.edge.publisher import Publisher
from extproc.edge.registrations import Registrations
from extproc.edge.release_admin import add_release_routes
from extproc.edge.release_desk import ReleaseDesk
from extproc.edge.scraper import Scraper, ScrapeSettings
from extproc.edge.state_dir import installation_seed
from extproc.edge.stream_guard import TIMEOUT_REASON, StreamGuard
from extproc.edge.stream_roles import GUARD_ROLE, SHADOW_ROLE, StreamRoles
from extproc.edge.warmup import WarmUp, WarmUpSettings
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.outcome import End, FailedAttempt, Renewal
from extproc.reconcile import Reconciler
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import ANONYMOUS, Tenant
from extproc.telemetry.admission_bindings import bind_admission
from extproc.telemetry.bindings import bind_feedback, bind_guard, bind_releases, bind_streams, bind_traces
from extproc.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_OWN_DETAILS = "gateway_"
"""Prefix of the response details of our own replies: their records close nothing."""
_GUARD_DETAILS = _OWN_DETAILS + TIMEOUT_REASON
"""But a guard's 504 ends a request that an engine had."""
_IDLE_POLL_S = 0.25


class Gateway:
    """One running extproc. ``start`` and ``stop`` frame its life; ``run`` waits for a signal in between."""

    def __init__(self, config_path: Path, snapshot: Snapshot) -> None:
        settings = snapshot.settings
        self.clock: Callable[[], float] = time.monotonic
        self.core = Core(
            rng=random.Random(),
            seed=installation_seed(settings.state_dir),
            max_blocks=settings.index.max_blocks,
            precise_blocks=settings.kv_events.max_blocks,
            worth={"GPU": 1.0, **settings.kv_events.worth},
            block_bytes=settings.index.block_bytes,
            on_considered=lambda considered, now: self.journal.considered(considered, now),
            on_settled=lambda settlement, now: self.journal.settled(settlement, now),
            on_released=lambda event: self.releases.happened(event),
        )
        self.releases = ReleaseDesk(self.core, settings, clock=self.clock)
        self.metrics = Metrics(self.core.fleet.endpoints, self.clock)
        self.journal = Journal(settings, self.metrics, self.clock)
        self.tracing = self.journal.tracing
        self.answers = Answers(("endpoint", "pool", "id") if settings.responses.headers else ())
        self.envoy_admin = EnvoyAdmin(settings.envoy.admin) if settings.envoy.admin else None
        self.live = LiveConfig(
            config_path,
            snapshot,
            Publisher(settings.envoy.live, self.envoy_admin),
            install=self._install,
            idle=self._removed_are_idle,
            on_reload=lambda generation, taken: self.metrics.reloaded(generation, applied=taken),
        )
        self.gatekeeper = Gatekeeper(
            self.core, lambda: self.live.snapshot, settings.state_dir, clock=self.clock
        )
        self.own = OwnAnswers(self._model_names, self.ready)
        self.access_log = AccessLogServicer(self._event, self.clock)
        self.engine_access = EngineAccess()
        self.knowledge = Knowledge(self.core, settings, self.engine_access)
        limits = StreamLimits(
            settings.limits.max_streams,
            settings.limits.max_buffered_bytes,
            max_plain_bytes=settings.limits.max_body_bytes,
            brown_out_lag_s=settings.limits.brown_out_lag,
        )
        self.lag = LoopLag(self.metrics.lagged)
        self.ext_proc = ExtProcServicer(
            identify=self.gatekeeper.identify,
            decide=self._decide_with_words,
            prepare=self.knowledge.prepare,
            reply=self.own.reply,
            on_rejected=self.journal.rejected,
            ledger=self.core.ledger,
            answers=self.answers,
            limits=limits,
            feedback_by_stream=settings.feedback == "stream",
            on_read=self.tracing.traces.read if self.tracing is not None else None,
            lag=lambda: self.lag.smoothed,
            clock=self.clock,
        )
        self.scraper = Scraper(
            self.core.fleet,
            ScrapeSettings(settings.scrape.interval, settings.scrape.timeout, settings.scrape.max_bytes),
            access=self.engine_access,
            on_result=self._scraped,
        )
        self.guard = StreamGuard(self._guarded, self.clock)
        self.copy_answers = Answers()
        self.shadow = ExtProcServicer(
            identify=lambda head, metadata: ANONYMOUS,
            decide=self.releases.decide_copy,
            reply=lambda head, tenant: None,
            on_rejected=self.journal.rejected,
            ledger=self.core.ledger,
            answers=self.copy_answers,
            limits=limits,
            clock=self.clock,
        )
        roles = StreamRoles(self.ext_proc, {GUARD_ROLE: self.guard, SHADOW_ROLE: self.shadow})
        self.reconciler = Reconciler(self.core.ledger)
        self.core.fleet.probed = True
        self.warm_up = WarmUp(
            self.core.fleet.endpoints, self.core.fleet.ready, self._warm_up_settings, self.engine_access
        )
        self.registrations = Registrations(
            settings.state_dir, self.core.fleet, self.live.reload, published=self._publishes
        )
        self.registrations.restore()
        self.grpc = GrpcServer(settings.listen, roles, self.access_log, settings.limits.message_bytes)
        admin = build_admin(self._admin_parts(settings))
        add_release_routes(admin, self.core.releases, self.core.shadows)
        self.admin = HttpServer(settings.listen.admin, admin)
        self._bind_metrics()
        self._tasks: list[asyncio.Task[None]] = []
        self._drain_notice_s = settings.listen.drain_notice
        self._stopping = False

    async def start(self) -> None:
        """Listen, publish, begin to watch and scrape. Raises OSError when an address or folder cannot be used."""
        self.gatekeeper.restore()
        self.releases.restore()
        await self.live.start()
        await self.admin.start()
        await self.grpc.start()
        for work in (
            self.live.run(),
            self.scraper.run(),
            self.knowledge.run(),
            self.warm_up.run(),
            self.lag.run(),
            self._housekeep(),
            self.gatekeeper.run(),
            self.releases.run(),
        ):
            self._tasks.append(asyncio.create_task(_watched(work)))
        await self.grpc.set_ready(True)
        settings = self.live.snapshot.settings
        log.info("serving", extra={"grpc": settings.listen.grpc, "admin": settings.listen.admin})

    async def stop(self, grace_s: float = 10.0) -> None:
        """Tell Envoy, let running decisions end, stop the rest."""
        self._stopping = True
        await self.grpc.set_ready(False)
        await self._drain(grace_s)
        # Only log streams are left, and they never end by themselves.
        await self.grpc.stop(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gatekeeper.close()
        await self.releases.save()
        self.knowledge.close()
        await self.admin.stop()
        if self.envoy_admin is not None:
            await self.envoy_admin.close()
        await self.journal.close()

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be served, and why not."""
        if self._stopping:
            return False, "stopping"
        if not self.core.fleet.endpoints:
            return False, "no endpoints are configured"
        return True, ""

    async def _drain(self, grace_s: float) -> None:
        """Wait until Envoy sends nothing more and everything begun has been answered."""
        began, notice_s = self.clock(), self._drain_notice_s
        while (waited := self.clock() - began) < grace_s:
            heard = waited >= notice_s or not self.access_log.counts.streams
            if heard and not self.ext_proc.counts.in_flight and not self.guard.counts.streams:
                return
            await asyncio.sleep(0.05)

    async def _decide_with_words(
        self, request: InferenceRequest, tenant: Tenant, hold: Hold
    ) -> Decision | Rejection:
        try:
            decided = await self.gatekeeper.decide(request, tenant, hold)
        except BaseException:
            if self.tracing is not None:
                self.tracing.traces.left(request.id)
            raise
        if isinstance(decided, Decision):
            if self.tracing is not None:
                decided.headers += self.tracing.traces.words(request.id)
            decided.headers += self.releases.words(request, decided)
            guard = decided.route.guard
            ticket = ticket_for(guard, request) if guard is not None else None
            if ticket is not None:
                decided.headers += ((GUARD, ticket.header()),)
        return decided

    def _scraped(self, endpoint: Endpoint, reason: str, seconds: float) -> None:
        self.metrics.scraped(endpoint.key, reason)
        self.gatekeeper.capacity_changed()

    def _guarded(self, request_id: str, word: str) -> None:
        """The guard ended a stream, or kept it alive. Envoy's record of a stream cut for silence says success."""
        if word == "heartbeat":
            return
        lease = self.core.ledger.leases.get(request_id)
        log.warning(
            "stream guard",
            extra={
                "request_id": request_id,
                "event": word,
                "endpoint": lease.endpoint.key if lease is not None else "",
            },
        )
        if word == "idle" and lease is not None and lease.blamed is not lease.endpoint:
            lease.blamed = lease.endpoint
            lease.endpoint.health.failed(self.clock())

    def _event(self, event: End | Renewal | FailedAttempt, now: float) -> None:
        details = event.details if isinstance(event, End) else ""
        if not details.startswith(_OWN_DETAILS) or details == _GUARD_DETAILS:
            self.core.take(event, now)

    def _install(self, snapshot: Snapshot, specs: tuple[EndpointSpec, ...]) -> None:
        self.core.fleet.rule(snapshot.settings.health.policy)
        self.journal.log_requests = snapshot.settings.logging.requests
        retries = self.core.ledger.retries
        retries.rule(snapshot.settings.retries.budget, float(snapshot.settings.retries.burst))
        retries.forget(snapshot.pools)
        router, rules = self.gatekeeper.rules(snapshot)
        self.core.install(router, specs, rules, self.clock())
        self.releases.install(snapshot.settings)
        for answers in (self.answers, self.copy_answers):
            answers.tenants = snapshot.identity.enabled
            answers.upstream_keys = snapshot.upstream_keys
        # A copy comes with the key that its original's engines want.
        self.copy_answers.tenants = snapshot.identity.enabled or bool(snapshot.upstream_keys)
        self.copy_answers.upstream_keys = snapshot.upstream_keys
        self.copy_answers.forget()
        self.metrics.models.know(frozenset(name for name, _ in snapshot.model_names()))
        self.engine_access.install(snapshot.clusters.tls)
        self.knowledge.install(snapshot)
        self.answers.forget()

    def _model_names(self) -> list[tuple[str, str]]:
        """What clients may ask for: configured names, and adapters that engines told of."""
        names = self.live.snapshot.model_names()
        known = {name for name, _ in names}
        return names + [pair for pair in self.core.fleet.adapters.pool_of.items() if pair[0] not in known]

    async def _removed_are_idle(self) -> None:
        while any(lease.endpoint.removed for lease in self.core.ledger.leases.values()):
            await asyncio.sleep(_IDLE_POLL_S)

    async def _housekeep(self) -> None:
        known_broken = self.access_log.counts.broken
        while True:
            await asyncio.sleep(1.0)
            now = self.clock()
            self.core.housekeep(now)
            broken, streams = self.access_log.counts.broken, self.access_log.counts.streams
            if self.live.snapshot.settings.feedback == "access_log":
                deaf = broken != known_broken or (not streams and bool(self.core.ledger.leases))
                self.reconciler.listened(now, deaf=deaf)
                known_broken = broken
                self.reconciler.work(now)

    async def _reload(self) -> list[str]:
        problems = await self.live.reload()
        return [str(problem) for problem in problems]

    def _admin_parts(self, settings: Settings) -> AdminParts:
        token_file = settings.listen.admin_token_file
        return AdminParts(
            metrics=self.metrics,
            endpoints=self.core.fleet.endpoints,
            ring=self.journal.ring,
            queue=lambda: queue_report(self.core.admission, list(self.live.snapshot.pools), self.clock()),
            ready=self.ready,
            config=lambda: self.live.snapshot.settings.model_dump(mode="json"),
            reload=self._reload,
            token=token_file.read_text().strip() if token_file is not None else None,
            loopback=parse_address(settings.listen.admin).is_local,
            clock=self.clock,
            registrations=self.registrations,
        )

    def _warm_up_settings(self) -> WarmUpSettings:
        settings = self.live.snapshot.settings
        pools, said = settings.pools, settings.health
        return WarmUpSettings(
            said.probe_interval,
            said.probe_timeout,
            said.warm_up_timeout,
            prompts=lambda name: pools[name].warm_up if name in pools else (),
        )

    def _publishes(self) -> bool:
        clusters = self.live.snapshot.clusters
        return bool(clusters.resources) or not clusters.names

    def _bind_metrics(self) -> None:
        index = self.core.view.index
        bind_streams(self.metrics, self.ext_proc.counts)
        bind_admission(self.metrics, self.core.admission, self.clock)
        bind_guard(self.metrics, self.guard.counts)
        bind_releases(self.metrics, self.core.releases, self.core.shadows, self.releases.events)
        bind_feedback(self.metrics, self.core.ledger, self.access_log.counts, self.core.fleet.endpoints)
        self.knowledge.bind(self.metrics)
        if self.tracing is not None:
            self.core.admission.on_stage = self.tracing.traces.passed
            bind_traces(self.metrics, self.tracing.exporter.counts)
        decisions, ring = self.journal.decision_log, self.journal.ring
        self.metrics.bind("decision_log_dropped", lambda: decisions.dropped if decisions is not None else 0)
        self.metrics.bind_caches(
            {
                "prefix_index": (lambda: index.entries, lambda: index.cap),
                **self.knowledge.caches(),
                "limit_clients": (
                    lambda: self.core.admission.limiter.clients,
                    lambda: self.core.admission.limiter.max_clients,
                ),
                "decisions": (lambda: len(ring), lambda: ring.capacity),
            }
        )


async def _watched(work: Coroutine[object, object, None]) -> None:
    """A background task must not die in silence."""
    try:
        await work
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("a background task died")
        raise


async def run(config_path: Path) -> None:
    """``extproc serve``: until SIGTERM or SIGINT.

    Raises:
        ConfigError: the configuration cannot be used.
        OSError: an address or folder cannot be used.
    """
    snapshot = load(config_path)
    logs = Logs(snapshot.settings.logging.format, snapshot.settings.logging.level)
    for warning in snapshot.warnings:
        log.warning(str(warning))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config_path, snapshot)
    # What is loaded by now stays to the end. A full collection that walks it holds the event loop for tens of milliseconds.
    gc.collect()
    gc.freeze()
    try:
        await gateway.start()
        await stop.wait()
        log.info("stopping")
    finally:
        await gateway.stop()
        logs.close()
