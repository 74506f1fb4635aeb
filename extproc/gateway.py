"""Builds the parts from a configuration and wires them: the one place that knows everybody."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from extproc.admission.dispatcher import Considered, Decision
from extproc.api.request import InferenceRequest
from extproc.config.load import load
from extproc.config.snapshot import Snapshot
from extproc.core import Core
from extproc.edge.access_log import AccessLogServicer
from extproc.edge.admin import AdminParts, AdminServer
from extproc.edge.answers import Answers
from extproc.edge.decision_log import DecisionLog
from extproc.edge.envoy_admin import EnvoyAdmin
from extproc.edge.ext_proc import ExtProcServicer, StreamLimits
from extproc.edge.grpc_server import GrpcServer
from extproc.edge.live_config import LiveConfig
from extproc.edge.logs import setup as setup_logs
from extproc.edge.loop_lag import LoopLag
from extproc.edge.own_answers import OwnAnswers
from extproc.edge.publisher import Publisher
from extproc.edge.scraper import Scraper, ScrapeSettings
from extproc.edge.state_dir import installation_seed
from extproc.fleet.endpoint import EndpointSpec
from extproc.ledger import Settlement
from extproc.outcome import End, FailedAttempt, Renewal
from extproc.routing.rejection import Rejection
from extproc.telemetry.decision import record_of, record_of_rejection
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.ring import DecisionRing

log = logging.getLogger(__name__)

_OWN_DETAILS = "gateway_"
"""Prefix of the response details of our own replies: their records close nothing."""
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
            on_considered=self._considered,
            on_settled=self._settled,
        )
        self.ring = DecisionRing(settings.decisions.ring)
        self.decision_log = DecisionLog.from_settings(settings.decisions)
        self.answers = Answers(("endpoint", "pool", "id") if settings.responses.headers else ())
        self.envoy_admin = EnvoyAdmin(settings.envoy.admin) if settings.envoy.admin else None
        self.live = LiveConfig(
            config_path,
            snapshot,
            Publisher(settings.envoy.live, self.envoy_admin),
            install=self._install,
            idle=self._removed_are_idle,
        )
        self.own = OwnAnswers(lambda: self.live.snapshot.model_names(), self.ready)
        self.access_log = AccessLogServicer(self._event, self.clock)
        self.ext_proc = ExtProcServicer(
            decide=self._decide,
            reply=self.own.reply,
            on_rejected=self._rejected,
            ledger=self.core.ledger,
            answers=self.answers,
            limits=StreamLimits(settings.limits.max_streams, settings.limits.max_buffered_bytes),
            feedback_by_stream=settings.feedback == "stream",
            clock=self.clock,
        )
        self.lag = LoopLag()
        self.metrics = Metrics()
        self.scraper = Scraper(
            self.core.fleet,
            ScrapeSettings(settings.scrape.interval, settings.scrape.timeout, settings.scrape.max_bytes),
        )
        self.grpc = GrpcServer(settings.listen, self.ext_proc, self.access_log, settings.limits.message_bytes)
        self.admin = AdminServer(settings.listen, self._admin_parts())
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Listen, publish, begin to watch and scrape. Raises OSError when an address or folder cannot be used."""
        await self.live.start()
        await self.admin.start()
        await self.grpc.start()
        for work in (self.live.run(), self.scraper.run(), self.lag.run(), self._housekeep()):
            self._tasks.append(asyncio.create_task(_watched(work)))
        await self.grpc.set_ready(True)
        settings = self.live.snapshot.settings
        log.info("serving", extra={"grpc": settings.listen.grpc, "admin": settings.listen.admin})

    async def stop(self, grace_s: float = 10.0) -> None:
        """Tell Envoy, let running decisions end, stop the rest."""
        self._stopping = True
        await self.grpc.set_ready(False)
        await self.grpc.stop(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.admin.stop()
        if self.envoy_admin is not None:
            await self.envoy_admin.close()
        self.decision_log.close()

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be served, and why not."""
        if self._stopping:
            return False, "stopping"
        if not self.core.fleet.endpoints:
            return False, "no endpoints are configured"
        return True, ""

    async def _decide(self, request: InferenceRequest) -> Decision | Rejection:
        return self.core.dispatcher.decide(request, self.clock())

    def _event(self, event: End | Renewal | FailedAttempt, now: float) -> None:
        if isinstance(event, End):
            self.metrics.ended(event)
            if event.details.startswith(_OWN_DETAILS):
                return
        self.core.take(event, now)

    def _considered(self, considered: Considered, now: float) -> None:
        took_us = (self.clock() - now) * 1e6
        self.metrics.decided(considered, took_us)
        self.ring.add(record_of(considered, time.time(), took_us))

    def _rejected(self, request: InferenceRequest | None, rejection: Rejection) -> None:
        self.metrics.rejected(request, rejection)
        if request is not None and self.ring.find(request.id) is None:
            self.ring.add(record_of_rejection(request, rejection, time.time()))

    def _settled(self, settlement: Settlement, now: float) -> None:
        self.metrics.settled(settlement)
        record = self.ring.settle(settlement)
        if record is not None:
            self.decision_log.write(record)

    def _install(self, snapshot: Snapshot, specs: tuple[EndpointSpec, ...]) -> None:
        _, removed = self.core.install(snapshot.router, specs)
        said = snapshot.settings.health
        for endpoint in self.core.fleet.endpoints.values():
            health = endpoint.health
            health.threshold, health.probation = said.failures, said.probation
            health.base_backoff_s, health.max_backoff_s = said.backoff, said.max_backoff
        for endpoint in removed:
            self.metrics.forget(endpoint.key)
        self.answers.forget()

    async def _removed_are_idle(self) -> None:
        while any(lease.endpoint.removed for lease in self.core.ledger.leases.values()):
            await asyncio.sleep(_IDLE_POLL_S)

    async def _housekeep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.core.housekeep(self.clock())

    def _admin_parts(self) -> AdminParts:
        raise NotImplementedError


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
    setup_logs(snapshot.settings.logging.level, snapshot.settings.logging.format)
    for warning in snapshot.warnings:
        log.warning(str(warning))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config_path, snapshot)
    await gateway.start()
    try:
        await stop.wait()
        log.info("stopping")
    finally:
        await gateway.stop()
