"""Conversations that name themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from extproc.simulator.options import Options
from tests.gateway.sim_fleet import SimFleet, running_fleet

ENGINES: dict[str, tuple[Options, dict[str, Any]]] = {name: (Options(), {}) for name in ("a", "b", "c")}


async def places(fleet: SimFleet, count: int, **more: Any) -> set[str]:
    """Where requests of unlike prompts go, while others keep the fleet moving."""
    seen = set()
    for number in range(count):
        others = [asyncio.create_task(fleet.ask(f"other {number} {one}")) for one in range(1)]
        status, place, _ = await fleet.ask(f"mine {number}", **more)
        assert status == 200
        seen.add(place)
        await asyncio.gather(*others)
    return seen


async def test_a_hint_keeps_a_session_where_waiting_costs_less(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, ENGINES, {"sessions": {"saves": 30}}) as fleet:
        assert len(await places(fleet, 6, headers={"x-session-id": "s1"})) == 1
        assert len(await places(fleet, 6, session_id="s2")) == 1
        assert len(await places(fleet, 9)) > 1


async def test_a_pin_keeps_a_session_under_any_strategy_until_its_endpoint_leaves(tmp_path: Path) -> None:
    settings = {
        "pools": {"pool": {"strategy": "round-robin"}},
        "routes": [
            {"name": "pinned", "match": {"header": {"x-mode": "pin"}}, "pool": "pool", "session": "pin"}
        ],
        "sessions": {"saves": 0},
    }
    async with running_fleet(tmp_path, ENGINES, settings) as fleet:
        free = await places(fleet, 6, headers={"x-session-id": "s"})
        assert len(free) > 1
        pinned = {"x-session-id": "p", "x-mode": "pin"}
        (place,) = await places(fleet, 6, headers=pinned)
        await fleet.engines[place].stop()
        status, _, _ = await fleet.ask("after", headers=pinned)
        assert status == 200
        await fleet.gateway.extproc.idle()
        (again,) = await places(fleet, 4, headers=pinned)
        assert again != place
