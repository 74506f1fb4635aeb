"""All endpoints by stable identity. The configuration comes and goes; leases, rates and health stay with the endpoint.

Rules of this file:

- an endpoint's identity is its key (cluster and address); a changed spec under the same key keeps the state;
- warming, ready, draining: see :mod:`extproc.fleet.lifecycle`;
- a removed endpoint leaves the tables at once (no new requests); open leases keep the object until they end;
- slots are small integers, reused; whoever indexes by slot is told (``on_purge``) before a slot changes hands;
- an engine restart (a counter fell, or a newer start time) bumps ``generation`` and purges what was known of its cache;
- an endpoint without samples of its own is taken to prefill as fast as the median of its pool's measured ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from extproc.engines.state import EngineState
from extproc.fleet import lifecycle
from extproc.fleet.adapters import Adapters
from extproc.fleet.endpoint import Endpoint, EndpointSpec, Lifecycle
from extproc.fleet.health import HealthPolicy
from extproc.fleet.peers import share


class Fleet:
    """The live endpoints. ``on_purge(endpoint)`` is called when the endpoint's cache contents are no longer known."""

    def __init__(self, on_purge: Callable[[Endpoint], None] = lambda endpoint: None) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.adapters = Adapters()
        self.on_purge = on_purge
        self.policy = HealthPolicy()
        self.probed = False
        """Somebody probes new endpoints and calls :meth:`ready`."""
        self.drained: set[str] = set()
        """Keys of endpoints that were drained by hand."""
        self._pools: dict[str, list[Endpoint]] = {}
        self._addresses: dict[tuple[str, str], Endpoint] = {}
        self._clusters: dict[str, list[Endpoint]] = {}
        self._free_slots: list[int] = []
        self._next_slot = 0

    def pool(self, name: str) -> list[Endpoint]:
        """Endpoints of a pool, in declaration order; empty for an unknown pool."""
        return self._pools.get(name, [])

    def find(self, cluster: str, address: str) -> Endpoint | None:
        """The endpoint that Envoy names in its log. A cluster's only endpoint is found whatever address DNS gave it."""
        found = self._addresses.get((cluster, address))
        if found is None:
            of_cluster = self._clusters.get(cluster, [])
            if len(of_cluster) == 1 and not of_cluster[0].spec.listed:
                return of_cluster[0]
        return found

    def apply(
        self, specs: Iterable[EndpointSpec], prior_rates: Mapping[str, float] | None = None
    ) -> tuple[list[Endpoint], list[Endpoint]]:
        """Take over a new declaration; returns the endpoints added and removed. Later duplicates of a key lose."""
        rates = prior_rates or {}
        wanted: dict[str, EndpointSpec] = {}
        for spec in specs:
            wanted.setdefault(spec.key, spec)
        removed = [endpoint for key, endpoint in self.endpoints.items() if key not in wanted]
        for endpoint in removed:
            self._remove(endpoint)
        before = dict(self._pools)
        added = []
        for key, spec in wanted.items():
            current = self.endpoints.get(key)
            if current is None:
                current = Endpoint(spec, self._take_slot(), rates.get(spec.pool, 8000.0), self.policy)
                self.endpoints[key] = current
                added.append(current)
                self._restate(current, before.get(spec.pool, []), new=True)
            else:
                current.spec = spec
                self._restate(current, before.get(spec.pool, []))
        self._index(wanted)
        self.adapters.keep(self.endpoints)
        return added, removed

    def rule(self, policy: HealthPolicy) -> None:
        """Bounds of health from now on; circuits keep their state."""
        self.policy = policy
        for endpoint in self.endpoints.values():
            endpoint.health.policy = policy

    def drain(self, endpoint: Endpoint) -> None:
        """No new requests by an operator's word; what runs there ends."""
        self.drained.add(endpoint.key)
        self._restate(endpoint, self.pool(endpoint.spec.pool))

    def undrain(self, endpoint: Endpoint) -> None:
        """Take the word back. An endpoint that its file says is draining stays so."""
        self.drained.discard(endpoint.key)
        self._restate(endpoint, self.pool(endpoint.spec.pool))

    def ready(self, endpoint: Endpoint) -> None:
        """A warming endpoint has shown that it can serve."""
        if endpoint.lifecycle is Lifecycle.WARMING:
            endpoint.lifecycle = Lifecycle.READY

    def scraped(self, endpoint: Endpoint, state: EngineState, now: float) -> None:
        """A scrape succeeded: learn from its counters, notice restarts, believe that the engine is reachable."""
        previous = endpoint.state
        if previous is not None and _restarted(previous, state):
            self.restarted(endpoint)
            previous = None
            endpoint.health.restarted(now)
        endpoint.observe(state, previous, now)
        self.adapters.running(endpoint)
        endpoint.scrape_failures = 0
        endpoint.health.answered(now)

    def scrape_failed(
        self, endpoint: Endpoint, now: float, *, refused: bool = False, timed_out: bool = False
    ) -> None:
        """A scrape failed. A refused connection speaks about the engine, and so does silence on the port that takes its
        requests (``timed_out``), when it answers no requests either; a missing or senseless page does not.
        """
        endpoint.scrape_failures += 1
        if refused:
            endpoint.health.failed(now, unreachable=True)
        elif timed_out:
            endpoint.health.timed_out(now)

    def restarted(self, endpoint: Endpoint) -> None:
        """The engine's cache is empty again, and its adapters must be loaded anew."""
        endpoint.generation += 1
        endpoint.adapters.clear()
        self.on_purge(endpoint)

    def share_rates(self, now: float, prior_rates: Mapping[str, float]) -> None:
        """Let the endpoints of each pool learn from each other."""
        for name, endpoints in self._pools.items():
            share([endpoint.rates for endpoint in endpoints], prior_rates.get(name), now)

    def _restate(self, endpoint: Endpoint, pool: list[Endpoint], *, new: bool = False) -> None:
        draining = endpoint.spec.draining or endpoint.key in self.drained
        if new or draining != (endpoint.lifecycle is Lifecycle.DRAINING):
            others = [other for other in pool if other is not endpoint and not other.removed]
            endpoint.lifecycle = lifecycle.first(draining=draining, probed=self.probed, others=others)

    def _remove(self, endpoint: Endpoint) -> None:
        endpoint.removed = True
        endpoint.lifecycle = Lifecycle.DRAINING
        endpoint.generation += 1
        self.on_purge(endpoint)
        del self.endpoints[endpoint.key]
        heapq.heappush(self._free_slots, endpoint.slot)

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._next_slot += 1
        return self._next_slot - 1

    def _index(self, order: Iterable[str]) -> None:
        self._pools, self._addresses, self._clusters = {}, {}, {}
        for key in order:
            endpoint = self.endpoints[key]
            spec = endpoint.spec
            self._pools.setdefault(spec.pool, []).append(endpoint)
            self._addresses[spec.cluster, spec.address] = endpoint
            self._clusters.setdefault(spec.cluster, []).append(endpoint)


def _restarted(before: EngineState, after: EngineState) -> bool:
    if before.started_at is not None and after.started_at is not None:
        return after.started_at > before.started_at + 1.0
    pairs = (
        (before.prompt_tokens_total, after.prompt_tokens_total),
        (before.generation_tokens_total, after.generation_tokens_total),
        (before.first_tokens_total, after.first_tokens_total),
    )
    return any(old is not None and new is not None and new < old for old, new in pairs)
