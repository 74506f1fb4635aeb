"""Gets new endpoints ready: asks their health page, then sends the pool's warm-up prompts straight to the engine.

Rules of this file:

- only warming endpoints are asked, each by one task, every ``interval_s`` until it answers;
- 2xx and 3xx are ready; so is 4xx other than 429: a server is there that has no such page. Refused connections,
  silence, 429 and 5xx are 'not yet', for as long as it takes: an endpoint that never answers never gets requests
  while its pool has others;
- a warm-up prompt is a system message with one token to answer, sent to the first model of the endpoint. One that fails
  is logged and skipped: a cold cache is slower, not wrong;
- the text of prompts is never logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from yarl import URL

from extproc.edge.scraper import Access
from extproc.engines.registry import engine_named
from extproc.fleet.endpoint import Endpoint, EndpointSpec, Lifecycle

log = logging.getLogger(__name__)

_TICK_S = 0.1


@dataclass(slots=True, frozen=True)
class WarmUpSettings:
    """Times, and each pool's prompts."""

    interval_s: float = 1.0
    timeout_s: float = 2.0
    prompt_timeout_s: float = 60.0
    prompts: Callable[[str], Sequence[str]] = lambda pool: ()
    """Pool -> its system prompts."""


class WarmUp:
    """Watches ``endpoints`` and calls ``on_ready`` for each warming one that has shown itself."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        on_ready: Callable[[Endpoint], None],
        settings: Callable[[], WarmUpSettings] = WarmUpSettings,
        access: Callable[[EndpointSpec], Access] = lambda spec: Access(),
    ) -> None:
        self._endpoints = endpoints
        self._on_ready = on_ready
        self._settings = settings
        self._access = access
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Work until cancelled; leaves no task and no connection behind."""
        async with aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(), headers={"user-agent": "extproc"}
        ) as session:
            try:
                while True:
                    self._look(session)
                    await asyncio.sleep(_TICK_S)
            finally:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)
                self._tasks.clear()

    def _look(self, session: aiohttp.ClientSession) -> None:
        for key in [key for key, task in self._tasks.items() if task.done()]:
            del self._tasks[key]
        for key, endpoint in self._endpoints.items():
            if endpoint.lifecycle is Lifecycle.WARMING and key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._warm(session, endpoint))

    async def _warm(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        while not await self._answers(session, endpoint.spec):
            await asyncio.sleep(self._settings().interval_s)
            if endpoint.removed or endpoint.lifecycle is not Lifecycle.WARMING:
                return
        for number, prompt in enumerate(self._settings().prompts(endpoint.spec.pool)):
            if endpoint.removed or endpoint.lifecycle is not Lifecycle.WARMING:
                return
            await self._prompt(session, endpoint.spec, number, prompt)
        if not endpoint.removed:
            self._on_ready(endpoint)
            log.info("endpoint is ready", extra={"endpoint": endpoint.key})

    async def _answers(self, session: aiohttp.ClientSession, spec: EndpointSpec) -> bool:
        path = engine_named(spec.engine).health_path
        try:
            status = await self._ask(session, spec, "GET", path, None, self._settings().timeout_s)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False
        return status < 500 and status != 429

    async def _prompt(
        self, session: aiohttp.ClientSession, spec: EndpointSpec, number: int, prompt: str
    ) -> None:
        body = json.dumps(
            {
                "model": spec.models[0] if spec.models else "",
                "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": "Hello"}],
                "max_tokens": 1,
            }
        ).encode()
        why = ""
        try:
            limit_s = self._settings().prompt_timeout_s
            status = await self._ask(session, spec, "POST", "/v1/chat/completions", body, limit_s)
            why = "" if status < 400 else f"status {status}"
        except TimeoutError:
            why = "timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = type(error).__name__
        if why:
            log.warning(
                "warm-up prompt failed", extra={"endpoint": spec.key, "prompt": number, "reason": why}
            )

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        spec: EndpointSpec,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
    ) -> int:
        access = self._access(spec)
        host, _, port = spec.address.rpartition(":")
        url = URL.build(
            scheme="https" if spec.tls else "http", host=host.strip("[]"), port=int(port), path=path
        )
        headers = {**access.headers, **({"content-type": "application/json"} if body else {})}
        async with session.request(
            method,
            url,
            data=body,
            headers=headers,
            ssl=access.ssl,
            server_hostname=access.server_hostname if spec.tls else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as reply:
            await reply.read()
            return reply.status
