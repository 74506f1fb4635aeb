"""Drives an engine by the event loop's clock, and tells waiting handlers what became of their jobs.

One timer is set to the engine's next event. First and last tokens are told at their event; the tokens in
between are looked up for all streams at once by a ticker (every ``tick_s``), so that the work is per tick
and stream, not per token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from extproc.simulator.engine import Engine
from extproc.simulator.events import (
    Aborted,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Finished,
    FirstToken,
    KvEvent,
    Rejected,
    Started,
)
from extproc.simulator.histogram import Histogram
from extproc.simulator.job import Job


class Ticket:
    """One job of the pump, as its handler sees it."""

    __slots__ = (
        "_waiter",
        "adapter",
        "cached",
        "done",
        "error",
        "id",
        "salt",
        "streaming",
        "tokens",
        "visible",
    )

    def __init__(self, job_id: str, tokens: bytes, adapter: str | None, salt: str, streaming: bool) -> None:
        self.id = job_id
        self.tokens = tokens
        """Prompt and reply: what KV events tell of the blocks."""
        self.adapter = adapter
        self.salt = salt
        self.streaming = streaming
        self.visible = 0
        """Output tokens made so far."""
        self.cached: int | None = None
        """Prompt tokens found in the prefix cache; None before the start."""
        self.done = False
        self.error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def more(self, seen: int) -> int:
        """Wait until more than ``seen`` tokens are there or the job has ended; returns the tokens there."""
        while self.visible <= seen and not self.done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.visible

    async def end(self) -> None:
        """Wait until the job has ended."""
        while not self.done:
            await self.more(self.visible)

    def wake(self) -> None:
        """Let the handler look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


StoredTokens = tuple[KvEvent, Ticket | None]
"""A KV event with the job whose tokens it speaks of (BlocksStored only)."""


class Pump:
    """The engine's tie to the event loop. ``on_kv`` gets the KV events of each step."""

    def __init__(
        self, engine: Engine, *, tick_s: float, on_kv: Callable[[list[StoredTokens]], None] | None = None
    ) -> None:
        self.engine = engine
        self.ttft = Histogram.of_ttft()
        self.e2e = Histogram.of_e2e()
        self._tick_s = tick_s
        self._on_kv = on_kv
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[str, Ticket] = {}
        self._streams: dict[str, Ticket] = {}
        self._ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def now(self) -> float:
        """The engine's time: the loop's clock."""
        return self._loop.time()

    def submit(
        self, tokens: bytes, hashes: list[int], prompt: int, output: int, *, adapter: str | None, salt: str,
        priority: int, streaming: bool,
    ) -> Ticket:  # fmt: skip
        """Give the engine a job; ``tokens`` are those of prompt and reply."""
        ticket = Ticket(str(next(self._ids)), tokens, adapter, salt, streaming)
        self._tickets[ticket.id] = ticket
        if streaming:
            self._streams[ticket.id] = ticket
            if self._ticker is None:
                self._ticker = self._loop.call_later(self._tick_s, self._tick)
        self.engine.submit(Job(ticket.id, hashes, prompt, output, adapter, priority), self.now)
        self._set_timer()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The handler has gone; nothing happens when the job has ended."""
        self._streams.pop(ticket.id, None)
        if not ticket.done:
            self.engine.cancel(ticket.id, self.now)
            self._set_timer()

    def clear_cache(self) -> bool:
        """Drop the prefix cache; False while the engine is busy."""
        cleared = self.engine.clear_cache(self.now)
        self._set_timer()
        return cleared

    def close(self) -> None:
        """Stop the timers and wake every handler; their jobs count as ended."""
        for timer in (self._timer, self._ticker):
            if timer is not None:
                timer.cancel()
        for ticket in self._tickets.values():
            ticket.done = True
            ticket.error = "the engine is shutting down"
            ticket.wake()
        self._tickets.clear()
        self._streams.clear()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.engine.next_event()
        self._timer = None if due is None else self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        # The loop may call a timer a clock tick early: the engine must not miss the event it was called for.
        due = self.engine.next_event()
        now = self.now if due is None else max(self.now, due)
        kv: list[StoredTokens] = []
        for event in self.engine.advance(now):
            if isinstance(event, BlocksStored):
                kv.append((event, self._tickets.get(event.id)))
            elif isinstance(event, BlocksRemoved | Cleared):
                kv.append((event, None))
            else:
                self._tell(event)
        if kv and self._on_kv is not None:
            self._on_kv(kv)
        self._set_timer()

    def _tell(self, event: object) -> None:
        """Bring one job's ticket up to date."""
        if isinstance(event, Started):
            ticket = self._tickets[event.id]
            if ticket.cached is None:
                ticket.cached = event.cached_tokens
        elif isinstance(event, FirstToken):
            ticket = self._tickets[event.id]
            self.ttft.observe(event.since_arrival_s)
            ticket.visible = max(ticket.visible, 1)
            ticket.wake()
        elif isinstance(event, Finished | Aborted | Rejected):
            ticket = self._tickets.pop(event.id)
            self._streams.pop(event.id, None)
            ticket.done = True
            if isinstance(event, Finished):
                self.e2e.observe(event.since_arrival_s)
                ticket.visible = event.output_tokens
            elif isinstance(event, Rejected):
                ticket.error = event.reason
            ticket.wake()

    def _tick(self) -> None:
        now = self.now
        for ticket in self._streams.values():
            visible = self.engine.generated(ticket.id, now)
            if visible > ticket.visible:
                ticket.visible = visible
                ticket.wake()
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if self._streams else None
