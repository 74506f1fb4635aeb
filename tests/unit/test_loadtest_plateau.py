"""The benchmark of memory asks what it says it asks."""

from __future__ import annotations

import json
import random

from extproc.telemetry.ring import DecisionRing
from loadtest.plateau import body, build, decide


def test_no_two_requests_are_alike() -> None:
    rng = random.Random(1)
    bodies = [json.loads(body(number, 400, rng)) for number in range(1, 41)]
    assert len({said["user"] for said in bodies}) == 40
    assert len({said["messages"][0]["content"] for said in bodies}) == 40
    assert sum(said["model"] != "model" for said in bodies) == 2, "nobody has these"
    assert sum("cache_salt" in said for said in bodies) == 4


def test_every_request_is_decided_recorded_and_ends() -> None:
    rng, ring = random.Random(1), DecisionRing(10)
    core = build(2, 1600, ring)
    for number in range(1, 41):
        end = decide(core, ring, number, 4000, float(number), rng)
        assert (end is None) == (number % 20 == 0)
        if end is not None:
            core.take(end, number + 0.5)
    assert (len(ring), ring.running, len(core.ledger.leases)) == (10, 0, 0)
    core.housekeep(41.0)
    assert 0 < core.view.index.entries <= 2 * 1600 // 64
