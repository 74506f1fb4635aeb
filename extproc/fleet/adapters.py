"""Which LoRA adapters the fleet serves, as the engines tell: by ``/v1/models`` and by their metrics.

Rules of this file:

- a model in ``/v1/models`` that names a ``parent`` is an adapter; others are base models;
- an adapter that an engine reports as running or waiting is served there, whatever its model list said before;
- what one endpoint told stands until it tells anew or leaves; endpoints that never told are not asked about;
- an adapter that several pools serve belongs to the one that told it first;
- names are bounded an endpoint, and in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from extproc.fleet.endpoint import Endpoint

MAX_NAMES = 1000
_MAX_IN_ALL = 20_000


@dataclass(slots=True, frozen=True)
class ServedModel:
    """One entry of a model list."""

    id: str
    parent: str | None = None


class Adapters:
    """Adapter -> pool. ``pool_of`` is the table that requests are matched with."""

    def __init__(self) -> None:
        self.pool_of: dict[str, str] = {}
        self._told: dict[str, tuple[Endpoint, frozenset[str]]] = {}
        """Endpoint key -> what it told in its model list."""

    def told(self, endpoint: Endpoint, models: Iterable[ServedModel]) -> None:
        """An endpoint's model list."""
        adapters = []
        served: list[str] = []
        for model in models:
            if len(served) >= MAX_NAMES:
                break
            served.append(model.id)
            if model.parent:
                adapters.append(model.id)
        endpoint.served = frozenset(served)
        before = self._told.get(endpoint.key)
        self._told[endpoint.key] = (endpoint, frozenset(adapters))
        if before is None or before[1] != frozenset(adapters):
            self._rebuild()

    def running(self, endpoint: Endpoint) -> None:
        """An endpoint was scraped: adapters it runs are served."""
        state = endpoint.state
        if state is None or not state.running_adapters:
            return
        for name in sorted(state.running_adapters | (state.waiting_adapters or frozenset())):
            if name not in self.pool_of and len(self.pool_of) < _MAX_IN_ALL:
                self.pool_of[name] = endpoint.spec.pool

    def keep(self, endpoints: Mapping[str, Endpoint]) -> None:
        """Forget what endpoints told that are gone."""
        gone = [key for key, (endpoint, _) in self._told.items() if endpoints.get(key) is not endpoint]
        for key in gone:
            del self._told[key]
        if gone:
            self._rebuild()
            for endpoint in endpoints.values():
                self.running(endpoint)

    def _rebuild(self) -> None:
        found: dict[str, str] = {}
        for endpoint, adapters in self._told.values():
            for name in sorted(adapters):
                if len(found) >= _MAX_IN_ALL:
                    break
                found.setdefault(name, endpoint.spec.pool)
        # In place: whoever matches requests holds this very table.
        self.pool_of.clear()
        self.pool_of.update(found)
