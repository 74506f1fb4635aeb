"""Which endpoints of a pool may take a request now, and why the others may not.

Rules of this file, in order; a rule that would leave nobody is the last to be waived:

- never: draining or warming, a sleeping engine, a role that cannot answer, an endpoint that does not serve the adapter;
- ``version``: only the version that the route's weights picked, unless it has no usable endpoint;
- ``excluded``: health keeps requests away; waived when every endpoint left is excluded (never shut out the last one);
- ``full``: at ``max_concurrency``; waived when all are full (a queue, where there is one, holds requests before this).
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.fleet.endpoint import Endpoint, Lifecycle, Role


def eligible(
    endpoints: Sequence[Endpoint],
    now: float,
    *,
    version: str | None = None,
    adapter: str = "",
) -> tuple[list[Endpoint], list[tuple[Endpoint, str]]]:
    """The endpoints that may be chosen, and the removed ones with a word that says why."""
    usable: list[Endpoint] = []
    removed: list[tuple[Endpoint, str]] = []
    for endpoint in endpoints:
        word = _never(endpoint, adapter)
        if word:
            removed.append((endpoint, word))
        else:
            usable.append(endpoint)
    if version is not None:
        usable = _keep(usable, removed, [e.spec.version == version for e in usable], "version")
    usable = _keep(usable, removed, [e.health.admits(now, e.leases) for e in usable], "excluded")
    usable = _keep(usable, removed, [_has_room(e) for e in usable], "full")
    return usable, removed


def _never(endpoint: Endpoint, adapter: str) -> str:
    if endpoint.lifecycle is not Lifecycle.READY:
        return endpoint.lifecycle.value
    if endpoint.spec.role is Role.PREFILL:
        return "role"
    state = endpoint.state
    if state is not None and state.sleeping:
        return "sleeping"
    if adapter and not endpoint.serves(adapter):
        return "adapter"
    return ""


def _has_room(endpoint: Endpoint) -> bool:
    bound = endpoint.spec.max_concurrency
    return bound is None or endpoint.leases < bound


def _keep(
    usable: list[Endpoint], removed: list[tuple[Endpoint, str]], passes: list[bool], word: str
) -> list[Endpoint]:
    if all(passes) or not any(passes):
        return usable
    removed.extend((endpoint, word) for endpoint, passed in zip(usable, passes, strict=True) if not passed)
    return [endpoint for endpoint, passed in zip(usable, passes, strict=True) if passed]
