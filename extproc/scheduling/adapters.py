"""What a LoRA adapter costs where it is not loaded, and where all the places for adapters are in use.

Rules of this file:

- an adapter is *active* on an endpoint while requests for it are open there. An engine runs as many adapters at once
  as it has places; requests of others wait until all requests of one active adapter have ended, whatever is loaded;
- active adapters get their places in the order in which they became active, so those after the last place wait, and
  so does whoever follows them;
- *resident* are the active ones and then those last asked for, as many as there are places: engines displace the one
  longest unused. Our own requests know this without any scrape; a scrape adds what others use, and the number of
  places. Until it is known, what was asked for is loaded and nobody waits;
- loading holds up a step of the engine, so all streams there wait with the request that needs it.

Source: our open leases and the order of our requests; the engine's number of places and its list of running adapters
(vLLM's ``vllm:lora_requests_info``, whose scheduler admits at most ``max_loras`` adapters to a step).
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import nsmallest
from itertools import islice

from extproc.fleet.endpoint import Endpoint
from extproc.scheduling.cost import MAX_INTERVAL_S, STALL_SHARE, STREAM_WEIGHT, Scene
from extproc.scheduling.strategy import Query

_MOST_LEASES = 100


class AdapterTerm:
    """Loading the request's LoRA adapter where it is not resident; where all places are in use, waiting for one."""

    name = "adapter"

    def __init__(self, load_s: float = 0.5, weight: float = STREAM_WEIGHT) -> None:
        self._load_s = load_s
        """Seconds to load an adapter: a 100 MB adapter from local disk or a warm page cache."""
        self._stall = weight * STALL_SHARE

    def seconds(self, query: Query, scene: Scene, now: float) -> list[float]:
        """0, or the loading time plus the wait for a place where none is free."""
        adapter = query.adapter
        if not adapter:
            return [0.0] * len(scene.endpoints)
        return [self._of(endpoint, adapter) for endpoint in scene.endpoints]

    def _of(self, endpoint: Endpoint, adapter: str) -> float:
        active, state = endpoint.adapter_leases, endpoint.state
        running = (state.running_adapters if state is not None else None) or ()
        strangers = [name for name in running if name not in endpoint.adapters]
        if adapter in strangers:
            return 0.0
        places = state.max_lora if state is not None else None
        if places is None:
            return 0.0 if adapter in endpoint.adapters else self._load(endpoint)
        free = places - len(strangers)
        before = _position(active, adapter)
        if before < free:
            if adapter in active or _resident(endpoint, adapter, free):
                return 0.0
            return self._load(endpoint)
        wait = _place_s(endpoint, list(islice(active.values(), max(free, 0))), before - free + 1)
        return wait if adapter in active else wait + self._load(endpoint)

    def _load(self, endpoint: Endpoint) -> float:
        return self._load_s * (1.0 + endpoint.leases * self._stall)


def _position(active: Collection[str], adapter: str) -> int:
    """How many adapters became active before this one."""
    for at, name in enumerate(active):
        if name == adapter:
            return at
    return len(active)


def _resident(endpoint: Endpoint, adapter: str, places: int) -> bool:
    """Whether an adapter that is not active is still loaded."""
    active = endpoint.adapter_leases
    if adapter not in endpoint.adapters:
        return False
    later = 0
    for name in reversed(endpoint.adapters):
        if name == adapter:
            return len(active) + later < places
        if name not in active:
            later += 1
    return False


def _place_s(endpoint: Endpoint, leases: list[int], ending: int) -> float:
    """Until so many of the adapters that have places have no request any more. A place that a stranger has is
    given back when one request ends."""
    counts = nsmallest(ending, leases) or [1]
    # The last of n exponential times is as long as one of them times 1 + 1/2 + ... + 1/n.
    longest = sum(1.0 / number for number in range(1, min(counts[-1], _MOST_LEASES) + 1))
    rounds = max(1.0, ending / max(len(leases), 1))
    return min(endpoint.rates.service * longest * rounds, MAX_INTERVAL_S)
