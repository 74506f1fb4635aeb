"""Reads every endpoint's metrics page again and again, and tells the fleet.

Rules of this file:

- one scrape an endpoint at a time, a bounded number in all, each bounded in time and bytes;
- endpoints are spread over the interval and jittered; they come and go with ``fleet.endpoints`` while we run;
- the fleet hears the end of every scrape; only a refused connection on the engine's own port is called
  ``refused``, and only silence there ``timed_out``: a missing or senseless page, or one on another port, says nothing
  about the engine's ability to answer requests;
- a page without any family that the engine's adapter expects is a failure, so that the last good state is
  kept and ages;
- compressed pages and those above ``thread_above`` bytes are read in a thread: the event loop is never held
  for long.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from typing import Protocol

import aiohttp
from yarl import URL

from extproc.edge.polling import poll
from extproc.engines.engine import Engine
from extproc.engines.registry import engine_named
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec

_TICK_S = 0.05
_LOG = logging.getLogger(__name__)


class ScrapedFleet(Protocol):
    """The part of the fleet that the scraper needs."""

    endpoints: dict[str, Endpoint]

    def scraped(self, endpoint: Endpoint, state: EngineState, now: float) -> None:
        """A scrape succeeded."""

    def scrape_failed(
        self, endpoint: Endpoint, now: float, *, refused: bool = False, timed_out: bool = False
    ) -> None:
        """A scrape failed."""


@dataclass(slots=True, frozen=True)
class ScrapeSettings:
    """Bounds of scraping."""

    interval_s: float = 1.0
    timeout_s: float = 2.0
    """For one whole scrape, connecting included."""
    max_bytes: int = 4 << 20
    """A longer page is a failure, not a reason to run out of memory."""
    concurrency: int = 256
    thread_above: int = 256 << 10


@dataclass(slots=True, frozen=True)
class Access:
    """How to reach the metrics page of a cluster: its TLS and the headers of its own credentials."""

    ssl: SSLContext | bool = True
    """True: the system's certificate authorities."""
    server_hostname: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class ScrapeFailure(Exception):
    """Why a scrape failed, in one word for metrics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class _Target:
    spec: EndpointSpec
    engine: Engine
    url: URL | None
    """None: nothing to scrape here."""
    due: float
    task: asyncio.Task[None] | None = None


class Scraper:
    """``await run()`` until cancelled. ``on_result(endpoint, reason, seconds)`` hears each scrape; reason
    ``ok`` is success.
    """

    def __init__(
        self,
        fleet: ScrapedFleet,
        settings: ScrapeSettings | None = None,
        *,
        access: Callable[[EndpointSpec], Access] = lambda spec: Access(),
        on_result: Callable[[Endpoint, str, float], None] = lambda endpoint, reason, seconds: None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings or ScrapeSettings()
        self._fleet = fleet
        self._access = access
        self._on_result = on_result
        self._rng = rng or random.Random()
        self._targets: dict[str, _Target] = {}
        self._places = asyncio.Semaphore(self.settings.concurrency)

    async def run(self) -> None:
        """Scrape until cancelled; leaves no task and no connection behind."""
        connector = aiohttp.TCPConnector(limit=self.settings.concurrency, keepalive_timeout=30.0)
        timeout = aiohttp.ClientTimeout(total=self.settings.timeout_s)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept": "text/plain", "accept-encoding": "identity", "user-agent": "extproc"},
        ) as session:
            try:
                await poll(partial(self._start_due, session), self._running, _TICK_S)
            finally:
                self._targets.clear()

    def _running(self) -> list[asyncio.Task[None]]:
        return [target.task for target in self._targets.values() if target.task is not None]

    def _start_due(self, session: aiohttp.ClientSession, now: float) -> None:
        endpoints = self._fleet.endpoints
        for key in [key for key in self._targets if key not in endpoints]:
            gone = self._targets.pop(key)
            if gone.task is not None:
                gone.task.cancel()
        for key, endpoint in endpoints.items():
            target = self._targets.get(key)
            if target is None or target.spec is not endpoint.spec:
                target = self._targets[key] = self._target(endpoint.spec, now, target)
            if target.url is not None and target.due <= now and (target.task is None or target.task.done()):
                target.due = max(target.due, now - _TICK_S) + self.settings.interval_s * self._rng.uniform(
                    0.9, 1.1
                )
                target.task = asyncio.create_task(self._scrape(session, endpoint, target, target.url))

    def _target(self, spec: EndpointSpec, now: float, before: _Target | None) -> _Target:
        engine = engine_named(spec.engine)
        try:
            url = metrics_url(spec, engine)
        except ValueError as error:
            _LOG.warning("no metrics from %s: %s", spec.key, error)
            url = None
        if before is not None:
            return _Target(spec, engine, url, before.due, before.task)
        return _Target(spec, engine, url, now + self._rng.random() * self.settings.interval_s)

    async def _scrape(
        self, session: aiohttp.ClientSession, endpoint: Endpoint, target: _Target, url: URL
    ) -> None:
        async with self._places:
            began = time.monotonic()
            reason, refused, silent, state = "ok", False, False, None
            own_port = url.port == _port(target.spec.address)
            try:
                state = await self._read(session, target, url, began)
            except ScrapeFailure as failure:
                reason = failure.reason
            except TimeoutError:
                reason = "timeout"
                silent = own_port
            except aiohttp.ClientConnectorDNSError:
                reason = "dns"
            except aiohttp.ClientSSLError:
                reason = "tls"
            except aiohttp.ClientConnectorError:
                reason = "refused"
                refused = own_port
            except (aiohttp.ClientError, OSError, ValueError):
                reason = "broken"
            now = time.monotonic()
            if endpoint.removed:
                return
            if state is not None:
                self._fleet.scraped(endpoint, state, now)
            else:
                self._fleet.scrape_failed(endpoint, now, refused=refused, timed_out=silent)
            self._on_result(endpoint, reason, now - began)

    async def _read(
        self, session: aiohttp.ClientSession, target: _Target, url: URL, began: float
    ) -> EngineState:
        access = self._access(target.spec)
        async with session.get(
            url,
            headers=access.headers,
            ssl=access.ssl,
            server_hostname=access.server_hostname if target.spec.tls else None,
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                raise ScrapeFailure("status")
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > self.settings.max_bytes:
                    raise ScrapeFailure("too_large")
            packed = response.headers.get("content-encoding", "identity") != "identity"
        if packed or len(page) > self.settings.thread_above:
            state = await asyncio.to_thread(self._parse, target.engine, page, packed, began)
        else:
            state = self._parse(target.engine, page, packed, began)
        if target.engine.tells and len(target.engine.missing(state)) == len(target.engine.tells):
            raise ScrapeFailure("unreadable")
        return state

    def _parse(self, engine: Engine, page: bytes | bytearray, packed: bool, began: float) -> EngineState:
        if packed:
            page = _unpacked(page, self.settings.max_bytes)
        return engine.read(page.decode("utf-8", "replace"), began)


def metrics_url(spec: EndpointSpec, engine: Engine) -> URL | None:
    """Where the endpoint's metrics are; None for an engine that has none. Raises no error: bad addresses fail
    later.
    """
    path = spec.metrics_path or engine.metrics_path
    if path is None:
        return None
    host = spec.address.rpartition(":")[0].strip("[]")
    port = spec.metrics_port or engine.metrics_port or _port(spec.address)
    path, _, query = path.partition("?")
    return URL.build(
        scheme="https" if spec.tls else "http", host=host, port=port, path=path, query_string=query
    )


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _unpacked(page: bytes | bytearray, max_bytes: int) -> bytes:
    """The gzip or zlib ``page`` in plain. We ask for plain text; some servers compress all the same."""
    try:
        plain = zlib.decompressobj(wbits=47).decompress(page, max_bytes + 1)
    except zlib.error:
        raise ScrapeFailure("broken") from None
    if len(plain) > max_bytes:
        raise ScrapeFailure("too_large")
    return plain
