"""LoRA adapters by their own model name, learnt from the engines' model lists."""

from __future__ import annotations

from pathlib import Path

from extproc.simulator.options import Options
from tests.gateway.envoy_process import until
from tests.gateway.sim_fleet import SimFleet, running_fleet


async def known(fleet: SimFleet, count: int) -> None:
    async def told() -> bool:
        return (await fleet.gateway.extproc.metrics())["extproc_adapters_known"] == count

    await until(told, 10, f"{count} adapters known")


async def test_adapters_are_learnt_and_asked_only_where_they_are_served(tmp_path: Path) -> None:
    engines = {
        "left": (Options(adapters=("sql", "both")), {}),
        "right": (Options(adapters=("legal", "both")), {}),
    }
    async with running_fleet(tmp_path, engines) as fleet:
        await known(fleet, 3)
        for number in range(3):
            for adapter, place in (("sql", "left"), ("legal", "right")):
                status, endpoint, body = await fleet.ask(f"{adapter} {number}", model=adapter)
                assert (status, endpoint, body["model"]) == (200, place, adapter)
        async with fleet.session.get(f"{fleet.gateway.url}/v1/models") as reply:
            listed = {entry["id"] for entry in (await reply.json())["data"]}
        assert listed == {"sim", "sql", "legal", "both"}
        status, _, body = await fleet.ask("who?", model="nobody")
        assert status == 404
        assert "nobody" in body["error"]["message"]


async def test_a_pool_of_another_model_is_not_asked_for_its_adapters(tmp_path: Path) -> None:
    engines = {
        "a": (Options(adapters=("tuned",)), {"pool": "one"}),
        "b": (Options(), {"pool": "two", "model": "other"}),
    }
    async with running_fleet(tmp_path, engines) as fleet:
        await known(fleet, 1)
        assert (await fleet.ask(model="tuned"))[:2] == (200, "a")
