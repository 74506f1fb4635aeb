"""Asks every engine for its model list now and then: which LoRA adapters it serves, and under which model.

Rules of this file: a new endpoint is asked within a second, then every ``interval_s``, jittered; one question an endpoint
at a time, a bounded number in all, each bounded in time and bytes. An engine that has no such list, or does not answer, is
left as it was: nothing is known is not nothing is served.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import aiohttp
import msgspec

from extproc.edge.polling import poll
from extproc.edge.scraper import Access
from extproc.fleet.adapters import MAX_NAMES, ServedModel
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.fleet import Fleet

_TICK_S = 0.5
_TIMEOUT_S = 5.0
_MAX_BYTES = 4 << 20
_AT_ONCE = 64


class _Entry(msgspec.Struct):
    id: str
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[_Entry] = []


_decode = msgspec.json.Decoder(_List).decode


class ModelsPoll:
    """``await run()`` until cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        access: Callable[[EndpointSpec], Access] = lambda spec: Access(),
        interval_s: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        self._fleet = fleet
        self._access = access
        self._interval_s = interval_s
        self._rng = rng or random.Random()
        self._due: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Ask until cancelled; leaves no task and no connection behind."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            await poll(partial(self._start_due, session), self._tasks.values, _TICK_S)

    def _start_due(self, session: aiohttp.ClientSession, now: float) -> None:
        endpoints = self._fleet.endpoints
        for key in [key for key in self._due if key not in endpoints]:
            del self._due[key]
        for key, endpoint in endpoints.items():
            if len(self._tasks) >= _AT_ONCE:
                return
            if self._due.get(key, 0.0) <= now and key not in self._tasks:
                self._due[key] = now + self._interval_s * self._rng.uniform(0.8, 1.2)
                self._tasks[key] = asyncio.create_task(self._ask(session, endpoint))

    async def _ask(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        spec = endpoint.spec
        access = self._access(spec)
        try:
            async with session.get(
                f"{'https' if spec.tls else 'http'}://{spec.address}/v1/models",
                headers=access.headers,
                ssl=access.ssl,
                server_hostname=access.server_hostname if spec.tls else None,
                allow_redirects=False,
            ) as reply:
                if reply.status != 200:
                    return
                body = bytearray()
                async for chunk in reply.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_BYTES:
                        return
            told = _decode(body).data[:MAX_NAMES]
            if not endpoint.removed and told:
                self._fleet.adapters.told(endpoint, [ServedModel(one.id, one.parent) for one in told])
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            pass
        finally:
            self._tasks.pop(spec.key, None)
