"""Operators change the fleet by the admin API and by ``extproc fleet``, while requests are served."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.gateway.echo_engine import EchoEngine, running_engine
from tests.gateway.envoy_process import until
from tests.gateway.gateway_process import Lab, chat, cluster, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = {"pools": {"pool": {"strategy": "round-robin"}}, "health": {"probe_interval": 0.05}}


def only_a(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [cluster("a", engines["a"].address)]


async def send(lab: Lab, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with lab.session.post(lab.extproc.admin_url + path, json=body, headers=headers) as reply:
        return reply.status, json.loads(await reply.read())


async def command(lab: Lab, *words: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of ``extproc fleet …``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "fleet", "--admin", lab.extproc.admin_url, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": "/usr/bin:/bin", **environment},
        cwd=Path(__file__).parents[2],
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def lives(lab: Lab) -> dict[str, str]:
    return {name: row["lifecycle"] for name, row in (await lab.extproc.fleet()).items()}


async def lives_are(lab: Lab, **wanted: str) -> None:
    async def agree() -> bool:
        return await lives(lab) == wanted

    await until(agree, 10, f"lifecycles are {wanted}")


async def served_by(lab: Lab, count: int) -> Counter[str]:
    answers = [await lab.post(chat(f"{n}")) for n in range(count)]
    assert {status for status, _, _ in answers} == {200}
    return Counter(headers["x-engine"] for _, headers, _ in answers)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path_factory.mktemp("mutations"), ("a", "b"), only_a, QUICK) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> AsyncIterator[Lab]:
    yield module_lab
    await module_lab.settled()
    await send(module_lab, "/fleet/undrain", {"endpoint": "a"})
    await send(module_lab, "/fleet/remove", {"endpoint": "b"})
    await lives_are(module_lab, a="ready")


class TestRegister:
    async def test_a_new_engine_gets_requests_once_its_health_page_answers(self, lab: Lab) -> None:
        status, done = await send(
            lab, "/fleet/register", {"address": lab["b"].address, "pool": "pool", "model": "m", "name": "b"}
        )
        assert (status, done["registered"]) == (200, "b")
        await lives_are(lab, a="ready", b="ready")
        assert set(await served_by(lab, 6)) == {"a", "b"}

    async def test_an_engine_that_does_not_answer_yet_gets_none(self, lab: Lab) -> None:
        lab["b"].status = 503
        await send(
            lab, "/fleet/register", {"address": lab["b"].address, "pool": "pool", "model": "m", "name": "b"}
        )
        await until(lambda: lab["b"].begun >= 3, 10, "it is asked again and again")
        assert await lives(lab) == {"a": "ready", "b": "warming"}
        assert await served_by(lab, 6) == {"a": 6}
        lab["b"].status = 200
        await lives_are(lab, a="ready", b="ready")

    async def test_what_cannot_be_is_said(self, lab: Lab) -> None:
        status, done = await send(lab, "/fleet/register", {"address": "nowhere", "pool": "pool"})
        assert (status, done["error"]["message"]) == (400, "`address` must be HOST:PORT")
        status, done = await send(lab, "/fleet/register", ["x"])
        assert (status, "JSON object" in done["error"]["message"]) == (400, True)
        status, _ = await send(lab, "/fleet/remove", {"endpoint": "a"})
        assert status == 409
        status, _ = await send(lab, "/fleet/drain", {"endpoint": "nobody"})
        assert status == 404
        status, _ = await send(lab, "/fleet/drain", {"endpoint": "a", "wait_s": "long"})
        assert status == 400
        status, _ = await send(lab, "/fleet/drain", {"endpoint": "a", "deadline": 3})
        assert status == 400


class TestDrain:
    async def test_what_runs_ends_and_nothing_new_comes(self, lab: Lab) -> None:
        await send(
            lab, "/fleet/register", {"address": lab["b"].address, "pool": "pool", "model": "m", "name": "b"}
        )
        await lives_are(lab, a="ready", b="ready")
        gate = asyncio.Event()
        for engine in lab.engines.values():
            engine.gate, engine.chunks = gate, 5
        running = [asyncio.create_task(lab.post(chat(f"{n}", stream=True))) for n in range(4)]
        await until(lambda: lab["a"].active + lab["b"].active == 4, 5, "all stream")
        held = lab["a"].active
        status, done = await send(lab, "/fleet/drain", {"endpoint": "a", "wait_s": 0.1})
        assert (status, done["idle"]) == (200, False)
        lab["b"].gate = None
        assert await served_by(lab, 6) == {"b": 6}
        waiting = asyncio.create_task(command(lab, "drain", "a", "--deadline", "30"))
        assert lab["a"].active == held
        gate.set()
        code, output = await waiting
        assert (code, "draining  0 requests" in output) == (0, True), output
        assert {status for status, _, _ in await asyncio.gather(*running)} == {200}

    async def test_the_deadline_is_an_exit_code(self, lab: Lab) -> None:
        gate = asyncio.Event()
        lab["a"].gate = gate
        running = asyncio.create_task(lab.post())
        await until(lambda: lab["a"].active == 1, 5, "a works")
        code, output = await command(lab, "drain", "a", "--deadline", "0.2")
        gate.set()
        assert (code, "requests still run there" in output) == (2, True), output
        assert (await running)[0] == 200

    async def test_a_drained_pool_says_so(self, lab: Lab) -> None:
        await send(lab, "/fleet/drain", {"endpoint": "a"})
        status, headers, reply = await lab.post()
        assert (status, b"draining" in reply) == (503, True)
        assert "retry-after" in headers


async def test_the_command_registers_and_removes(lab: Lab) -> None:
    code, output = await command(
        lab, "register", lab["b"].address, "--pool", "pool", "--model", "m", "--name", "b", "--weight", "2"
    )
    assert (code, output.startswith(f"b/{lab['b'].address}  pool  ")) == (0, True), output
    await lives_are(lab, a="ready", b="ready")
    code, output = await command(lab)
    assert (code, "2 endpoints" in output) == (0, True), output
    code, output = await command(lab, "remove", "b")
    assert (code, "gone" in output) == (0, True), output
    await lives_are(lab, a="ready")
    code, output = await command(lab, "remove", "b")
    assert (code, output) == (1, "no endpoint `b`\n")


async def test_the_description_names_every_page(lab: Lab) -> None:
    described = await lab.extproc.get("/openapi.json")
    assert described["openapi"].startswith("3.1")
    assert {"/metrics", "/readyz", "/fleet", "/fleet/drain", "/fleet/register", "/decisions/{id}"} <= set(
        described["paths"]
    )
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            if method == "get" and "{" not in path:
                async with lab.session.get(lab.extproc.admin_url + path) as reply:
                    assert reply.status != 404, path


async def test_what_operators_did_outlives_extproc(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ("a", "b"), only_a, QUICK) as lab:
        await send(
            lab, "/fleet/register", {"address": lab["b"].address, "pool": "pool", "model": "m", "name": "b"}
        )
        await lives_are(lab, a="ready", b="ready")
        await send(lab, "/fleet/drain", {"endpoint": "a"})
        await lab.extproc.kill()
        await lab.gateway.restart_extproc()
        await lab.extproc.ready()
        await lab.gateway.decides()
        assert await lives(lab) == {"a": "draining", "b": "ready"}
        assert await served_by(lab, 4) == {"b": 4}


async def test_a_registered_engine_that_leaves_takes_its_running_requests_to_the_end(tmp_path: Path) -> None:
    async with running_lab(tmp_path, ("a", "b"), only_a, QUICK) as lab:
        await send(
            lab, "/fleet/register", {"address": lab["b"].address, "pool": "pool", "model": "m", "name": "b"}
        )
        await lives_are(lab, a="ready", b="ready")
        await send(lab, "/fleet/drain", {"endpoint": "a"})
        gate = asyncio.Event()
        lab["b"].gate, lab["b"].chunks = gate, 5
        running = asyncio.create_task(lab.post(chat(stream=True)))
        await until(lambda: lab["b"].active == 1, 5, "b streams")
        await send(lab, "/fleet/undrain", {"endpoint": "a"})
        await send(lab, "/fleet/remove", {"endpoint": "b"})
        assert await served_by(lab, 4) == {"a": 4}
        gate.set()
        status, _, body = await running
        assert (status, body.rstrip().endswith(b"data: [DONE]")) == (200, True)

        async def gone() -> bool:
            return not await lab.gateway.envoy.stats(r"^cluster\.b\.upstream_rq_total$")

        await until(gone, 10, "Envoy has forgotten the cluster")


async def test_changes_need_the_token_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    listen = {"listen": {"admin_token_file": "token"}}
    async with running_lab(tmp_path, ("a",), only_a, QUICK | listen) as lab:
        status, _ = await send(lab, "/fleet/drain", {"endpoint": "a"})
        assert status == 401
        status, _ = await send(lab, "/fleet/drain", {"endpoint": "a"}, authorization="Bearer s3cret")
        assert status == 200
        code, output = await command(lab, "undrain", "a")
        assert (code, "token" in output) == (1, True), output
        code, _ = await command(lab, "undrain", "a", EXTPROC_ADMIN_TOKEN="s3cret")
        assert code == 0


async def test_warm_up_prompts_are_computed_before_the_first_request(tmp_path: Path) -> None:
    prompts = ["You are the helpful assistant of a bank.", "You write SQL."]
    pool = {"pools": {"pool": {"strategy": "round-robin", "warm_up": prompts}}}
    async with running_engine("b") as late, running_lab(tmp_path, ("a",), only_a, QUICK | pool) as lab:
        assert not lab["a"].posts, "the first endpoints of a pool are ready at once"
        late.gate = asyncio.Event()
        async with aiohttp.ClientSession() as session:
            asked = {"address": late.address, "pool": "pool", "model": "m", "name": "b"}
            async with session.post(f"{lab.extproc.admin_url}/fleet/register", json=asked) as reply:
                assert reply.status == 200
        # The gate holds every answer of the new engine, its health page's too.
        assert await served_by(lab, 4) == {"a": 4}
        late.gate.set()
        await lives_are(lab, a="ready", b="ready")
        sent = [json.loads(one.body) for one in late.posts]
        assert [one["messages"][0] for one in sent] == [
            {"role": "system", "content": prompt} for prompt in prompts
        ]
        assert {(one["model"], one["max_tokens"]) for one in sent} == {("m", 1)}
