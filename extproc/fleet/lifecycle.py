"""The life of an endpoint, from its first mention to its removal.

    state    | event                                                  | next
    ---------+--------------------------------------------------------+---------
    (new)    | ``state: draining`` is written, or it was drained      | draining
    (new)    | somebody probes, and its pool has a ready endpoint     | warming
    (new)    | otherwise                                              | ready
    warming  | it answers its health page and had its warm-up prompts | ready
    any      | drained: by the file or by hand                        | draining
    draining | no longer: as if it were new                           | warming or ready
    any      | removed from the files, or by hand                     | gone

Rules of this file:

- warming endpoints get no requests while others can take them; draining ones get none at all, and what runs there ends;
- only where somebody probes can an endpoint ever leave ``warming``: replays and tests of the core have no prober;
- a drain by hand outlives reloads and restarts, and ends by hand only.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.fleet.endpoint import Endpoint, Lifecycle


def first(*, draining: bool, probed: bool, others: Sequence[Endpoint]) -> Lifecycle:
    """The state of an endpoint that is new, or no longer drained. ``others``: the pool without it."""
    if draining:
        return Lifecycle.DRAINING
    if probed and any(other.lifecycle is Lifecycle.READY for other in others):
        return Lifecycle.WARMING
    return Lifecycle.READY
