"""A release through a real Envoy: split, pin, rollback by a guard, orders, a restart, the webhook."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from typer.testing import CliRunner

from extproc.cli import app as cli
from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [
        cluster("old", engines["old"].address, version="v1"),
        cluster("new", engines["new"].address, version="v2"),
    ]


def settings(steps: str, **more: Any) -> dict[str, Any]:
    release = {"baseline": "v1", "candidate": "v2", "steps": steps, "pin_header": "x-release"}
    # One failure in many must not exclude the only endpoint of a version before the release is judged.
    health = {"failures": 10_000, "error_rate": 1.0}
    return {"pools": {"pool": {"release": release}}, "health": health, "state_dir": "state", **more}


async def order(lab: Lab, word: str, **said: str) -> tuple[int, Any]:
    async with lab.session.post(f"{lab.extproc.admin_url}/releases/pool/{word}", json=said) as reply:
        return reply.status, await reply.json()


async def release(lab: Lab) -> dict[str, Any]:
    (row,) = (await lab.extproc.get("/releases"))["releases"]
    return dict(row)


async def served(lab: Lab, count: int, **headers: str) -> dict[str, set[str]]:
    """Session -> engines that answered, of ``count`` requests in 50 sessions."""

    async def one(number: int) -> tuple[str, str]:
        session = f"s{number % 50}"
        _, reply_headers, _ = await lab.post(x_session_id=session, **headers)
        return session, reply_headers["x-engine"]

    found: dict[str, set[str]] = {}
    for session, engine in await gather_bounded(count, 10, one):
        found.setdefault(session, set()).add(engine)
    return found


@contextlib.asynccontextmanager
async def listener(answers: list[int]) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook endpoint that answers with these statuses, then 200; yields its URL and what it got."""
    got: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json())
        return web.Response(status=answers.pop(0) if answers else 200)

    application = web.Application()
    application.router.add_post("/hook", take)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{port}/hook", got
    finally:
        await runner.cleanup()


async def test_split_pin_orders_restart_and_webhook(tmp_path: Path) -> None:
    async with (
        listener([500]) as (url, got),
        running_lab(
            tmp_path,
            ("old", "new"),
            clusters,
            settings("30 % 1h, 100 %", releases={"webhook": url}),
        ) as lab,
    ):
        # The split is sticky, and about its share.
        await until(lambda: any(item["release"]["kind"] == "started" for item in got), 10, "webhook told")
        first = await served(lab, 150)
        assert all(len(engines) == 1 for engines in first.values())
        on_new = {session for session, engines in first.items() if engines == {"new"}}
        assert 5 <= len(on_new) <= 25

        # Testers choose.
        assert set.union(*(await served(lab, 50, x_release="v2")).values()) == {"new"}
        assert set.union(*(await served(lab, 50, x_release="v1")).values()) == {"old"}
        seen = await release(lab)
        assert sum(seen["seen"]["requests"].values()) == 150, "testers' requests are no evidence"

        # Orders; a pause survives a restart, and so does everybody's version.
        assert (await order(lab, "pause"))[0] == 200
        status, told = await order(lab, "pause")
        assert (status, told["error"]["message"]) == (
            409,
            "the release is paused, only a running one can be paused",
        )

        def saved() -> bool:
            path = tmp_path / "state" / "releases.json"
            return path.exists() and json.loads(path.read_text())["pool"]["state"] == "paused"

        await until(saved, 5, "state on disk")
        await lab.extproc.kill()
        await lab.gateway.restart_extproc()
        await lab.extproc.ready()
        await lab.gateway.decides()
        assert (await release(lab))["state"] == "paused"
        assert await served(lab, 50) == first

        # The command line, and everybody back in one step.
        address = ["--admin", lab.extproc.admin_url]
        listed = await asyncio.to_thread(CliRunner().invoke, cli, ["release", "list", *address])
        assert "v1 -> v2" in listed.output
        done = await asyncio.to_thread(
            CliRunner().invoke, cli, ["release", "rollback", "pool", "--reason", "smells", *address]
        )
        assert "v2 has 0% of the clients" in done.output, done.output
        assert set.union(*(await served(lab, 50)).values()) == {"old"}
        compared = await asyncio.to_thread(CliRunner().invoke, cli, ["release", "compare", *address])
        assert "v2" in compared.output, compared.output

        # The first attempt was answered 500: it was tried again.
        def told_all() -> bool:
            return [item["release"]["kind"] for item in got] == [
                "started",
                "started",
                "paused",
                "rolled_back",
            ]

        await until(told_all, 10, f"webhook heard everything: {[item['release']['kind'] for item in got]}")
        assert got[-1]["release"]["reason"] == "smells"
        metrics = await lab.extproc.metrics()
        assert metrics['extproc_release_share{candidate="v2",pool="pool",state="rolled_back"}'] == 0.0


async def test_a_candidate_that_fails_is_rolled_back(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ("old", "new"), clusters, settings("50 % 1h, 100 %")) as lab:
        await until(lambda: _share(lab, 0.5), 10, "release begun")
        lab["new"].status = 500

        async def rolled_back() -> bool:
            await asyncio.gather(*(lab.post() for _ in range(20)))
            return bool((await release(lab))["state"] == "rolled_back")

        await until(rolled_back, 40, "rolled back")
        row = await release(lab)
        assert row["reason"].startswith("errors: error rate 100.00%, baseline 0.00%")
        assert [status for status, _, _ in await asyncio.gather(*(lab.post() for _ in range(20)))] == [
            200
        ] * 20
        assert "release" in lab.extproc.log
        assert await lab.extproc.total("extproc_release_events_total") == 2


async def test_blue_green_moves_everybody_at_once(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ("old", "new"), clusters, settings("100 %")) as lab:
        await until(lambda: _share(lab, 1.0), 10, "switched")
        assert set.union(*(await served(lab, 50)).values()) == {"new"}
        assert (await order(lab, "rollback"))[1]["share"] == 0.0
        assert set.union(*(await served(lab, 50)).values()) == {"old"}


async def test_orders_need_the_token_and_make_sense(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    async with running_lab(tmp_path, ("old", "new"), clusters, settings("50 % 1h, 100 %")) as lab:
        base = f"{lab.extproc.admin_url}/releases/pool"
        for path, body, wanted in (
            ("score", {"version": "v9", "score": 1}, 409),
            ("score", {"version": "v1", "score": "high"}, 400),
            ("score", {"version": "v1", "score": 0.5}, 200),
            ("explode", {}, 404),
        ):
            async with lab.session.post(f"{base}/{path}", json=body) as reply:
                assert reply.status == wanted, (path, await reply.text())
        async with lab.session.post(f"{base}/pause", headers={"origin": "http://evil"}) as reply:
            assert reply.status == 403
        async with aiohttp.ClientSession() as other, other.post(f"{base}x/pause") as reply:
            assert reply.status == 409


async def _share(lab: Lab, share: float) -> bool:
    return bool((await release(lab))["share"] == share)


@pytest.mark.parametrize("name", ["extproc_release_share", "extproc_release_events_total"])
def test_metrics_are_documented(name: str) -> None:
    assert name in (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_a_request_body_is_what_the_others_send() -> None:
    assert json.loads(chat())["model"] == "m"
