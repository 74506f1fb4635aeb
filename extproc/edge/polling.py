"""The loop of everything that asks engines again and again: begin what is due, and at the end leave no task behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NoReturn


async def poll(
    start_due: Callable[[float], None], running: Callable[[], Iterable[asyncio.Task[None]]], tick_s: float
) -> NoReturn:
    """Call ``start_due(now)`` (monotonic seconds) every ``tick_s`` until cancelled; then ``running`` are cancelled too."""
    try:
        while True:
            start_due(time.monotonic())
            await asyncio.sleep(tick_s)
    finally:
        tasks = list(running())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
