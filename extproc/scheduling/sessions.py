"""Where conversations that name themselves were last: session -> endpoint, for a while.

Rules of this file: a session belongs to one pool; it moves with every decision; it is forgotten ``ttl_s`` after its
last request, or when there are too many, the longest unused first. A session is a hint in seconds (``SessionTerm``), or a
pin where the route says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from extproc.fleet.endpoint import Endpoint
from extproc.scheduling.cost import Scene
from extproc.scheduling.strategy import Choice, Query


class Sessions:
    """Bounded map. ``saves_s`` is what staying is worth to a session, in seconds; 0 turns the hint off."""

    def __init__(self, *, ttl_s: float = 1800.0, most: int = 100_000, saves_s: float = 0.05) -> None:
        self.ttl_s = ttl_s
        self.most = most
        self.saves_s = saves_s
        self._known: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, pool: str, session: str, now: float) -> str | None:
        """Key of the session's endpoint; None when it has none."""
        known = self._known.get((pool, session))
        if known is None:
            return None
        key, until = known
        if now > until:
            del self._known[pool, session]
            return None
        return key

    def decided(self, pool: str, session: str, endpoint: Endpoint, now: float) -> None:
        """A request of the session goes to this endpoint."""
        name = (pool, session)
        self._known[name] = (endpoint.key, now + self.ttl_s)
        self._known.move_to_end(name)
        while len(self._known) > self.most:
            self._known.popitem(last=False)

    def sweep(self, now: float) -> None:
        """Forget those whose time is over, some at a time."""
        for _ in range(1000):
            if not self._known:
                return
            name, (_, until) = next(iter(self._known.items()))
            if until >= now:
                return
            del self._known[name]


class SessionTerm:
    """What a session loses by leaving its endpoint, beside the prompt that is known to be cached there: state that no
    index sees. Source: the session's last decision."""

    name = "session"

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """0 at the session's endpoint, the hint elsewhere; 0 everywhere for a session whose endpoint is no
        candidate."""
        kept, saves = query.session_endpoint, query.session_saves_s
        if not kept or saves <= 0.0 or all(endpoint.key != kept for endpoint in scene.endpoints):
            return [0.0] * len(scene.endpoints)
        return [0.0 if endpoint.key == kept else saves for endpoint in scene.endpoints]


def pinned(ranked: Sequence[Choice], key: str | None) -> list[Choice]:
    """The same choices with the session's endpoint first, where it is among them."""
    first = [choice for choice in ranked if choice.endpoint.key == key]
    return [*first, *(choice for choice in ranked if choice.endpoint.key != key)] if first else list(ranked)
