"""Whether an engine hangs: it decodes for us, and made no token from one scrape to the next.

Rules of this file:

- only engines that count tokens at every step can be seen to stand still (``EngineState.counts_steps``), and only while one
  of our own streams is known to decode there: a long prompt by itself shows nothing until it is done;
- a standstill has lasted since the last scrape that showed a token. How long it will last nobody knows; the best
  guess for what has no typical length is as long again;
- it is over when a counter moves or a request of ours ends there. Counters that stand still while requests end are
  not believed, until they move.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.engines.state import EngineState
from extproc.fleet.counters import growth

_LONGEST_S = 30.0
_LIES = 3


@dataclass(slots=True)
class Standstill:
    """Of one endpoint. Times are monotonic seconds."""

    since: float | None = None
    """The last scrape that showed a token, while it stands still."""
    _moved_at: float = float("-inf")
    _lies: int = 0
    """Requests that ended since a counter moved last, each in a standstill."""

    def seconds(self, now: float) -> float:
        """How much longer it will last: as long as it has. 0 while the engine moves."""
        return 0.0 if self.since is None else min(max(now - self.since, 0.0), _LONGEST_S)

    def observe(self, state: EngineState, previous: EngineState | None, decoding: int) -> bool:
        """A scrape, with so many of our leases known to decode. Whether the engine stood still since the last."""
        if previous is None or not state.counts_steps:
            self.since = None
            return False
        counts = [
            growth(previous, state, "generation_tokens_total"),
            growth(previous, state, "first_tokens_total"),
            growth(previous, state, "computed_prompt_tokens_total"),
        ]
        if any(counts):
            self.since, self._lies = None, 0
            return False
        idle = not previous.running or not state.running
        if counts[0] is None or idle or decoding < 1 or self._lies >= _LIES or self._moved_at > previous.at:
            self.since = None
            return False
        if self.since is None:
            self.since = previous.at
        return True

    def moved(self, now: float) -> None:
        """A request of ours ended well there."""
        self._moved_at = now
        if self.since is not None:
            self.since = None
            self._lies += 1
