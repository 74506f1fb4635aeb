"""Tells somebody's HTTP endpoint of events: one JSON POST each, in order, a few attempts, never in anybody's way.

A 2xx answer is success. Anything else, or none in time, is tried again with doubled pauses; then the event is dropped and
counted. While an event is tried at most ``LONGEST`` others wait; more are dropped too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

log = logging.getLogger(__name__)

LONGEST = 100


@dataclass(slots=True, frozen=True)
class WebhookSettings:
    """Where to, and how patiently. Seconds."""

    url: str
    token: str | None = None
    timeout_s: float = 5.0
    attempts: int = 4
    first_pause_s: float = 1.0


class Webhook:
    """:meth:`tell` from the event loop; :meth:`run` is the task that sends."""

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings = settings
        self.sent = 0
        self.dropped = 0
        self._waiting: deque[bytes] = deque()
        self._more = asyncio.Event()

    def tell(self, event: Mapping[str, object]) -> None:
        """Send this, soon."""
        if len(self._waiting) >= LONGEST:
            self._drop("too many events wait")
            return
        self._waiting.append(msgspec.json.encode(event))
        self._more.set()

    async def run(self) -> None:
        """Send for ever; ends by cancellation."""
        timeout = aiohttp.ClientTimeout(total=self.settings.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._more.wait()
                while self._waiting:
                    await self._deliver(session, self._waiting[0])
                    self._waiting.popleft()
                self._more.clear()

    async def _deliver(self, session: aiohttp.ClientSession, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        if self.settings.token is not None:
            headers["authorization"] = f"Bearer {self.settings.token}"
        why, pause = "", self.settings.first_pause_s
        for attempt in range(self.settings.attempts):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                async with session.post(
                    self.settings.url, data=body, headers=headers, allow_redirects=False
                ) as reply:
                    if 200 <= reply.status < 300:
                        self.sent += 1
                        return
                    why = f"status {reply.status}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = type(error).__name__
        self._drop(why)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        log.warning("webhook: event dropped", extra={"reason": why})
