"""Prefill on one endpoint, decode on another: the prefiller is named in a header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from extproc.simulator.options import Options
from tests.gateway.sim_fleet import running_fleet

HEADER = "x-prefiller-host-port"


def engines(*roles: str) -> dict[str, tuple[Options, dict[str, Any]]]:
    return {
        f"{role}-{number}": (Options(record=5), {"role": role}) for number, role in enumerate(roles, start=1)
    }


async def test_long_prompts_name_a_prefiller_and_short_ones_do_not(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, engines("prefill", "decode")) as fleet:
        status, place, _ = await fleet.ask("long " * 4000)
        assert (status, place) == (200, "decode-2")
        assert fleet.headers_seen("decode-2")[HEADER] == f"127.0.0.1:{fleet.engines['prefill-1'].port}"
        status, place, _ = await fleet.ask("short")
        assert (status, place) == (200, "decode-2")
        assert HEADER not in fleet.headers_seen("decode-2")
        assert fleet.engines["prefill-1"].recorder.last(1) == []


async def test_a_cached_prompt_is_decoded_alone(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, engines("prefill", "decode")) as fleet:
        text = "again " * 4000
        await fleet.ask(text)
        assert HEADER in fleet.headers_seen("decode-2")
        await fleet.gateway.extproc.idle()
        await fleet.ask(text)
        assert HEADER not in fleet.headers_seen("decode-2")


async def test_a_client_cannot_name_a_prefiller(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, engines("prefill", "decode")) as fleet:
        status, _, _ = await fleet.ask("short", headers={HEADER: "10.0.0.1:1"})
        assert status == 200
        assert fleet.headers_seen("decode-2").get(HEADER, "") == ""


async def test_the_header_has_the_name_that_the_pool_gives_it(tmp_path: Path) -> None:
    settings = {"pools": {"pool": {"disaggregation": {"header": "x-kv-from", "min_uncached_tokens": 10}}}}
    async with running_fleet(tmp_path, engines("prefill", "decode"), settings) as fleet:
        await fleet.ask("some words here " * 200)
        assert fleet.headers_seen("decode-2")["x-kv-from"].startswith("127.0.0.1:")
