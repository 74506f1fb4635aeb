"""Load on an engine that is not ours, or that ours does not explain: told from its gauges and our leases.

Rules of this file:

- waiting requests beyond our unstarted leases, and running ones beyond our started ones, are strangers'. A
  gauge and our count are never of the same instant, so only what two scrapes in a row agree on counts;
- ``slots``: when something waits and the number of running requests stays the same from one scrape to the
  next, this is how many the engine runs at a time. A higher number seen running proves it wrong;
- ``depth`` is the number waiting, smoothed over a few seconds;
- an engine that has work yet shows the same numbers scrape after scrape shows a picture, not its state: then
  nothing counts until something moves;
- a number that is missing, negative or not a number says nothing and changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extproc.engines.state import EngineState

_SMOOTH_S = 5.0
_FEWEST_SLOTS = 4
_STILL_SCRAPES = 8
_ABSURD = 1e9


@dataclass(slots=True)
class Strangers:
    """Requests of others, and the engine's slots, as of the newest scrape."""

    waiting: float | None = None
    running: float | None = None
    slots: float | None = None
    depth: float | None = None
    free_tokens: float | None = None
    """Tokens that still fit into the KV cache; None unless the engine told its size, use and running requests."""
    tokens_per_request: float = 1.0
    """KV tokens that one completion frees, on average."""
    _last_waiting: float | None = None
    _last_running: float | None = None
    _still: int = 0
    """Scrapes in a row with work and without any change."""

    def observe(self, state: EngineState, previous: EngineState | None, leases: int, unstarted: int) -> None:
        """Compare a scrape with our open leases, of which ``unstarted`` are not known to have started."""
        waiting, running = number(state.waiting), number(state.running)
        self._still = self._still + 1 if _same(state, previous) and (waiting or running) else 0
        if self._still >= _STILL_SCRAPES:
            self.waiting = self.running = self.slots = self.depth = self.free_tokens = None
            return
        self._observe_memory(state, running)
        beyond = None if waiting is None else max(waiting - unstarted, 0.0)
        self.waiting, self._last_waiting = _agreed(self._last_waiting, beyond), beyond
        # All our leases may run already, however many we believe to be unstarted.
        beyond = None if running is None else max(running - leases, 0.0)
        self.running, self._last_running = _agreed(self._last_running, beyond), beyond
        before = number(previous.running) if previous is not None else None
        queued = number(previous.waiting) if previous is not None else None
        if self.slots is not None and running is not None and running > self.slots:
            self.slots = None
        if waiting and queued and running == before and running is not None and running >= _FEWEST_SLOTS:
            self.slots = running
        if waiting is not None:
            if self.depth is None or previous is None:
                self.depth = waiting
            else:
                weight = 1.0 - math.exp(-max(state.at - previous.at, 0.0) / _SMOOTH_S)
                self.depth += (waiting - self.depth) * weight

    def _observe_memory(self, state: EngineState, running: float | None) -> None:
        usage = number(state.kv_usage)
        self.free_tokens = None
        if running and usage is not None and usage <= 1.0 and state.kv_blocks and state.block_size:
            room = state.kv_blocks * state.block_size
            self.free_tokens = (1.0 - usage) * room
            self.tokens_per_request = max(usage * room / running, 1.0)


def number(value: float | None) -> float | None:
    """The value if it is a number that an engine can mean: at least zero, and below a billion."""
    return value if value is not None and 0.0 <= value < _ABSURD else None


def _same(state: EngineState, previous: EngineState | None) -> bool:
    return previous is not None and (
        state.waiting == previous.waiting
        and state.running == previous.running
        and state.kv_usage == previous.kv_usage
        and state.generation_tokens_total == previous.generation_tokens_total
        and state.prompt_tokens_total == previous.prompt_tokens_total
    )


def _agreed(before: float | None, beyond: float | None) -> float | None:
    if beyond is None:
        return None
    return beyond if before is None else min(before, beyond)
