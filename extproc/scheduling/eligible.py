"""Which endpoints of a pool may take a request now, and why the others may not.

Rules of this file, in order; a rule that would leave nobody is waived:

- never: draining, a sleeping engine, a role that cannot answer, an endpoint that does not serve the adapter;
- ``warming``: new and not yet ready; taken only when there is no other;
- ``excluded``: health keeps requests away. Those that do not answer at all (refused connections, silence) are left out
  however many they are; of those left out for errors, busy answers or while on trial at most ``max_ejection`` of the
  endpoints, the ones that may come back soonest stay in. The last one is never left out;
- ``version``: only the version that the route's weights picked;
- ``full``: at ``max_concurrency`` (a queue, where there is one, holds requests before this);
- with ``room`` (a queue stands before this) those without room are left out before the version is asked for, and nobody is
  left when all are full: a version whose endpoints are full lends its requests to the others;
- ``saturated``: more requests wait in the engine than ``queue_share`` of ``max_concurrency``, by a fresh scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.fleet.endpoint import Endpoint, Lifecycle, Role
from extproc.fleet.health import HealthPolicy

_DEFAULTS = HealthPolicy()


def eligible(
    endpoints: Sequence[Endpoint],
    now: float,
    *,
    version: str | None = None,
    adapter: str = "",
    policy: HealthPolicy = _DEFAULTS,
    room: Callable[[Endpoint], bool] | None = None,
) -> tuple[list[Endpoint], list[tuple[Endpoint, str]]]:
    """The endpoints that may be chosen, and the removed ones with a word that says why."""
    usable: list[Endpoint] = []
    removed: list[tuple[Endpoint, str]] = []
    warming: list[Endpoint] = []
    draining, warming_up, prefill = Lifecycle.DRAINING, Lifecycle.WARMING, Role.PREFILL
    for endpoint in endpoints:
        lifecycle, state = endpoint.lifecycle, endpoint.state
        if lifecycle is draining:
            removed.append((endpoint, "draining"))
        elif endpoint.spec.role is prefill:
            removed.append((endpoint, "role"))
        elif state is not None and state.sleeping:
            removed.append((endpoint, "sleeping"))
        elif adapter and not endpoint.serves(adapter):
            removed.append((endpoint, "adapter"))
        elif lifecycle is warming_up:
            warming.append(endpoint)
        else:
            usable.append(endpoint)
    if not usable:
        usable = warming
    elif warming:
        removed.extend((endpoint, "warming") for endpoint in warming)
    admitted = [e.health.admits(now, e.leases) for e in usable]
    if not all(admitted):
        usable = _keep(usable, removed, _bounded(usable, admitted, now, policy.max_ejection), "excluded")
    if room is not None:
        full = [e for e in usable if not room(e)]
        if full:
            removed.extend((e, "full") for e in full)
            usable = [e for e in usable if e not in full]
    if version is not None:
        usable = _keep(usable, removed, [e.spec.version == version for e in usable], "version")
    if room is None:
        usable = _keep(usable, removed, [_has_room(e) for e in usable], "full")
    share = policy.queue_share
    moving = [e.spec.max_concurrency is None or _moves(e, now, share) for e in usable]
    usable = _keep(usable, removed, moving, "saturated")
    return usable, removed


def _bounded(usable: list[Endpoint], admitted: list[bool], now: float, share: float) -> list[bool]:
    """``admitted``, with the endpoints put back by which more than ``share`` of all would be left out."""
    doubtful = [
        place for place, fine in enumerate(admitted) if not fine and not usable[place].health.evident(now)
    ]
    surplus = len(doubtful) - int(len(usable) * share + 1e-9)
    if surplus > 0:
        doubtful.sort(key=lambda place: usable[place].health.blocked_until())
        for place in doubtful[:surplus]:
            admitted[place] = True
    return admitted


def _has_room(endpoint: Endpoint) -> bool:
    bound = endpoint.spec.max_concurrency
    return bound is None or endpoint.leases < bound


def _moves(endpoint: Endpoint, now: float, share: float) -> bool:
    bound, state = endpoint.spec.max_concurrency, endpoint.state
    if bound is None or state is None or state.waiting is None or now > endpoint.fresh_until:
        return True
    return not state.waiting > share * bound


def _keep(
    usable: list[Endpoint], removed: list[tuple[Endpoint, str]], passes: list[bool], word: str
) -> list[Endpoint]:
    if all(passes) or not any(passes):
        return usable
    removed.extend((endpoint, word) for endpoint, passed in zip(usable, passes, strict=True) if not passed)
    return [endpoint for endpoint, passed in zip(usable, passes, strict=True) if passed]
