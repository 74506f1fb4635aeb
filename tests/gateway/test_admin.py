"""The admin pages over real HTTP, and the terminal views on top of them."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import resource
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from extproc.edge.admin import AdminParts, build_admin, masked
from extproc.edge.http_server import HttpServer
from extproc.edge.loop_lag import LoopLag
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import EndpointSpec
from extproc.fleet.fleet import Fleet
from extproc.fleet_view import AdminError, fetch, run_explain, run_fleet
from extproc.routing.rejection import model_not_found
from extproc.telemetry.decision import DecisionRecord
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.ring import DecisionRing
from tests.gateway.envoy_process import free_port, until


@dataclass
class Running:
    """An admin server whose parts tests change."""

    parts: AdminParts
    fleet: Fleet
    session: aiohttp.ClientSession
    url: str = ""
    state: tuple[bool, str] = (True, "")
    problems: list[str] = field(default_factory=list)
    reloads: int = 0

    async def get(self, path: str) -> tuple[int, object]:
        async with self.session.get(self.url + path) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def post(self, path: str, **headers: str) -> tuple[int, dict[str, object]]:
        async with self.session.post(self.url + path, headers=headers) as response:
            return response.status, await response.json()


@pytest.fixture
async def admin() -> AsyncIterator[Running]:
    fleet = Fleet()
    fleet.apply([EndpointSpec("c", "10.0.0.1:8000", "chat"), EndpointSpec("d", "10.0.0.2:8000", "chat")])
    now = 100.0
    fleet.endpoints["c/10.0.0.1:8000"].state = EngineState(at=99.0, running=2.0, kv_usage=0.5)

    async def reload() -> list[str]:
        running.reloads += 1
        return running.problems

    parts = AdminParts(
        metrics=Metrics(fleet.endpoints, lambda: now),
        endpoints=fleet.endpoints,
        ring=DecisionRing(5),
        ready=lambda: running.state,
        config=lambda: {"pools": {"chat": {"upstream_key": "sk-123"}}, "tenants": [{"api_keys": ["a", "b"]}]},
        reload=reload,
        clock=lambda: now,
    )
    async with aiohttp.ClientSession() as session:
        running = Running(parts, fleet, session)
        runner = web.AppRunner(build_admin(parts))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        running.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield running
        finally:
            await runner.cleanup()


async def test_metrics_page(admin: Running) -> None:
    async with admin.session.get(admin.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    assert 'extproc_endpoint_engine_running{endpoint="c/10.0.0.1:8000",pool="chat"} 2.0' in text
    assert "extproc_process_resident_memory_bytes" in text


async def test_alive_and_ready_are_two_questions(admin: Running) -> None:
    admin.state = (False, "draining")
    assert await admin.get("/livez") == (200, {"live": True})
    assert await admin.get("/readyz") == (503, {"ready": False, "reason": "draining"})
    admin.state = (True, "")
    assert (await admin.get("/readyz"))[0] == 200


async def test_fleet_says_what_is_known_and_null_for_the_rest(admin: Running) -> None:
    status, body = await admin.get("/fleet")
    assert status == 200
    assert isinstance(body, dict)
    first, second = body["endpoints"]
    assert (first["endpoint"], first["running"], first["kv_usage"], first["scrape_age_s"]) == (
        "c/10.0.0.1:8000",
        2.0,
        0.5,
        1.0,
    )
    assert first["waiting"] is None
    assert second["running"] is None


async def test_decisions_newest_first_and_by_id(admin: Running) -> None:
    for number in range(3):
        admin.parts.ring.add(DecisionRecord(f"r{number}", 1.0, rejection=model_not_found("x", [])))
    _, body = await admin.get("/decisions?count=2")
    assert isinstance(body, dict)
    assert [record["id"] for record in body["decisions"]] == ["r2", "r1"]
    status, record = await admin.get("/decisions/r0")
    assert status == 200
    assert isinstance(record, dict)
    assert record["rejection"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/decisions/nobody", "/nowhere"])
async def test_what_is_not_there_is_a_json_404(admin: Running, path: str) -> None:
    status, body = await admin.get(path)
    assert status == 404
    assert isinstance(body, dict)
    assert body["error"]["status"] == 404


@pytest.mark.parametrize("count", ["x", "-1", "²"])
async def test_a_senseless_count_is_a_json_400(admin: Running, count: str) -> None:
    assert (await admin.get(f"/decisions?count={count}"))[0] == 400


async def test_a_wrong_method_is_a_json_405(admin: Running) -> None:
    status, body = await admin.post("/fleet")
    assert status == 405
    assert "error" in body


async def test_a_fault_of_ours_is_a_json_500(admin: Running) -> None:
    admin.parts.config = lambda: 1 / 0  # type: ignore[assignment,return-value]
    assert (await admin.get("/config"))[0] == 500


async def test_secrets_are_masked(admin: Running) -> None:
    _, body = await admin.get("/config")
    assert body == {"pools": {"chat": {"upstream_key": "***"}}, "tenants": [{"api_keys": ["***", "***"]}]}


def test_masking_leaves_paths_and_numbers() -> None:
    value = {"admin_token_file": "/etc/t", "max_tokens": 5, "password": "x", "note": "key"}
    assert masked(value) == {"admin_token_file": "/etc/t", "max_tokens": 5, "password": "***", "note": "key"}


async def test_reload_applies_or_says_what_is_wrong(admin: Running) -> None:
    assert await admin.post("/reload") == (200, {"applied": True, "problems": []})
    admin.problems = ["extproc.yaml:3: no"]
    assert await admin.post("/reload") == (422, {"applied": False, "problems": ["extproc.yaml:3: no"]})


async def test_web_pages_cannot_change_anything_on_loopback(admin: Running) -> None:
    assert (await admin.post("/reload", origin="http://evil.example"))[0] == 403
    assert admin.reloads == 0


async def test_beyond_loopback_changes_need_a_token(admin: Running) -> None:
    admin.parts.loopback = False
    assert (await admin.post("/reload"))[0] == 403
    admin.parts.token = "t0ken"
    assert (await admin.post("/reload"))[0] == 401
    assert (await admin.post("/reload", authorization="Bearer wrong"))[0] == 401
    assert admin.reloads == 0
    assert (await admin.post("/reload", authorization="Bearer t0ken"))[0] == 200
    assert (await admin.get("/fleet"))[0] == 200


def screen() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160), out


async def test_the_fleet_view(admin: Running) -> None:
    console, out = screen()
    await asyncio.to_thread(run_fleet, admin.url, once=True, console=console)
    assert "\nc  " in out.getvalue()
    assert "50%" in out.getvalue()
    console, out = screen()
    await asyncio.to_thread(run_fleet, admin.url, json_output=True, console=console)
    assert len(json.loads(out.getvalue())["endpoints"]) == 2


async def test_the_explain_view(admin: Running) -> None:
    admin.parts.ring.add(DecisionRecord("r/1", 1.0, rejection=model_not_found("x", [])))
    console, out = screen()
    await asyncio.to_thread(run_explain, admin.url, "r/1", console=console)
    assert "model_not_found" in out.getvalue()


async def test_views_say_in_words_what_went_wrong(admin: Running) -> None:
    with pytest.raises(AdminError, match="no decision with this id"):
        await asyncio.to_thread(run_explain, admin.url, "nobody")
    with pytest.raises(AdminError, match="no answer from"):
        await asyncio.to_thread(fetch, "http://127.0.0.1:9", "/fleet")


def test_loop_lag_keeps_the_worst_of_the_last_ten_seconds() -> None:
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda seconds, worst: seen.append((seconds, worst)), every_s=2.5)
    for seconds in (0.3, 0.1, 0.0, 0.0, 0.0):
        lag.saw(seconds)
    assert [worst for _, worst in seen] == [0.3, 0.3, 0.3, 0.3, 0.1]


async def test_without_file_descriptors_the_log_does_not_fill(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    server = HttpServer(f"127.0.0.1:{port}", web.Application())
    await server.start()
    clients = [socket.socket() for _ in range(40)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(client.fileno() for client in clients) + 1, before[1]))
    try:
        for client in clients:
            client.setblocking(False)
            assert client.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
        await until(
            lambda: "out of system resource" in caplog.text, 5.0, "asyncio has nothing to accept with"
        )
        await asyncio.sleep(0)
        assert caplog.text.count("out of system resource") < 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for client in clients:
            client.close()
        await server.stop()
