"""Reads the use of GPUs from the dcgm-exporters that endpoints name (``dcgm_url``), for people to look at.

Rules of this file:

- a page is read once for all endpoints that name it, every ``interval_s``, jittered; one reading a page at a time, a
  bounded number in all, each bounded in time and bytes;
- it is not the engine: its credentials and TLS are not used here, and no failure touches the endpoint's health. The last
  value stays with its time and becomes unknown by age;
- that a page begins to fail, or is back, is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

import aiohttp

from extproc.edge.polling import poll
from extproc.engines import dcgm
from extproc.engines.scan import Page
from extproc.fleet.endpoint import Endpoint

_TICK_S = 0.25
_AT_ONCE = 16

log = logging.getLogger(__name__)


class _Unreadable(Exception):
    """Why a page is of no use."""


class DcgmPoll:
    """``await run()`` until cancelled. ``endpoints`` may change meanwhile."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        *,
        interval_s: float = 5.0,
        timeout_s: float = 2.0,
        max_bytes: int = 1 << 20,
        rng: random.Random | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._rng = rng or random.Random()
        self._due: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failing: set[str] = set()
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        """Read until cancelled; leaves no task and no connection behind."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_AT_ONCE),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept": "text/plain", "accept-encoding": "identity", "user-agent": "extproc"},
        ) as session:
            await poll(partial(self._start_due, session), self._tasks.values, min(_TICK_S, self._interval_s))

    def _start_due(self, session: aiohttp.ClientSession, now: float) -> None:
        watched: dict[str, list[Endpoint]] = {}
        for endpoint in self._endpoints.values():
            if endpoint.spec.dcgm_url is not None:
                watched.setdefault(endpoint.spec.dcgm_url, []).append(endpoint)
        for url in [url for url in self._due if url not in watched]:
            del self._due[url]
            self._failing.discard(url)
        for url, endpoints in watched.items():
            due = self._due.setdefault(url, now + self._rng.random() * min(self._interval_s, 1.0))
            if due <= now and url not in self._tasks:
                self._due[url] = now + self._interval_s * self._rng.uniform(0.9, 1.1)
                self._tasks[url] = asyncio.create_task(self._watch(session, url, endpoints))

    async def _watch(self, session: aiohttp.ClientSession, url: str, endpoints: list[Endpoint]) -> None:
        try:
            async with self._places:
                began = time.monotonic()
                page = await self._read(session, url)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, _Unreadable) as error:
            # The words of aiohttp may repeat the URL, whose query may hold a secret.
            self._said(url, str(error) if isinstance(error, _Unreadable) else type(error).__name__)
            return
        finally:
            self._tasks.pop(url, None)
        untold = None
        for endpoint in endpoints:
            spec = endpoint.spec
            if spec.dcgm_url != url:  # it was edited while we read
                continue
            value = dcgm.gpu_utilization(page, spec.dcgm_gpus)
            if value is None:
                untold = f"the page says nothing of the GPUs of {endpoint.key}"
            else:
                endpoint.gpu_utilization, endpoint.gpu_utilization_at = value, began
        self._said(url, untold)

    async def _read(self, session: aiohttp.ClientSession, url: str) -> Page:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise _Unreadable(f"status {response.status}")
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > self._max_bytes:
                    raise _Unreadable("page too large")
        return dcgm.read(page.decode("utf-8", "replace"))

    def _said(self, url: str, why_not: str | None) -> None:
        if url not in self._due or (why_not is not None) == (url in self._failing):
            return
        parts = urlsplit(url)
        place = f"{parts.scheme}://{parts.netloc}{parts.path}"
        if why_not is None:
            self._failing.discard(url)
            log.info("GPU use is read again", extra={"url": place})
        else:
            self._failing.add(url)
            log.warning("GPU use not read", extra={"url": place, "reason": why_not})
