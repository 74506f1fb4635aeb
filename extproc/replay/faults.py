"""Things that go wrong at set times, as words: ``slow:engine=3:factor=5:at=60:for=120``.

| kind | what happens to the engine |
|---|---|
| ``slow`` | every step takes ``factor`` times as long |
| ``stall`` | nothing moves ``for`` so long (3 s), as if the engine compiled or swapped; its metrics answer |
| ``down`` | connections are refused, running requests break off; it comes back with an empty cache |
| ``frozen-metrics`` | scrapes show the numbers of the beginning again and again |
| ``no-metrics`` | scrapes fail, requests go on |

``engine`` counts from 0; without it all engines are meant. ``at`` and ``for`` are seconds of the replay; without
``for`` it stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extproc.replay.errors import ReplayError
from extproc.replay.words import name_and_numbers

KINDS = ("slow", "stall", "down", "frozen-metrics", "no-metrics")
_STALL_S = 3.0
_MOST = {"engine": 1e6, "factor": 1000.0, "at": 1e6, "for": 1e6}


@dataclass(slots=True, frozen=True)
class Fault:
    """One fault; ``engine`` None means all."""

    kind: str
    engine: int | None = None
    factor: float = 3.0
    at_s: float = 0.0
    for_s: float = math.inf

    def engines(self, count: int) -> range:
        """Numbers of the engines it strikes, of ``count``."""
        return range(count) if self.engine is None else range(self.engine, self.engine + 1)


def parse_fault(words: str, engines: int) -> Fault:
    """Read one fault for a fleet of so many engines.

    Raises:
        ReplayError: unknown kind or key, or a value out of range.
    """
    kind, values = name_and_numbers(words, "fault", KINDS, _MOST)
    if not values.get("engine", 0.0).is_integer():
        raise ReplayError(f"fault {words!r}: engine must be a whole number")
    engine = int(values["engine"]) if "engine" in values else None
    if engine is not None and engine >= engines:
        raise ReplayError(f"fault {words!r}: there are {engines} engines, counted from 0")
    factor = values.get("factor", 3.0)
    if factor <= 0:
        raise ReplayError(f"fault {words!r}: factor must be above 0")
    always = _STALL_S if kind == "stall" else math.inf
    return Fault(kind, engine, factor, values.get("at", 0.0), values.get("for", always))
