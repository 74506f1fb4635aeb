"""``extproc demo``: what people write for an engine, what it says, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from extproc.cli import app
from extproc.demo_banner import banner
from extproc.demo_engines import Engine, EngineError, engine_url, look


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://localhost:18001/v1", "http://localhost:18001"),
        ("http://localhost:18001/v1/", "http://localhost:18001"),
        ("localhost:8000", "http://localhost:8000"),
        ("localhost:8000/v1", "http://localhost:8000"),
        ("http://vllm", "http://vllm:80"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_what_people_write_for_an_engine(said: str, meant: str) -> None:
    assert engine_url(said) == meant


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("https://llm.example/v1", "plain http to engines"),
        ("http://host:8000/openai", "must be at /v1"),
        ("http://host:http", "write http://HOST:PORT"),
        ("ftp://host", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
    ],
)
def test_what_cannot_be_an_engine(said: str, told: str) -> None:
    with pytest.raises(EngineError, match=told) as error:
        engine_url(said)
    assert str(error.value).startswith(f"--engine {said}: ")


@asynccontextmanager
async def engine(*models: str, status: int = 200, text: str | None = None) -> AsyncIterator[str]:
    """HOST:PORT of something that answers ``/v1/models`` so."""

    async def answer(_: web.Request) -> web.Response:
        if text is not None:
            return web.Response(text=text)
        return web.json_response({"data": [{"id": name} for name in models]}, status=status)

    application = web.Application()
    application.router.add_get("/v1/models", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_engines_are_taken_with_the_models_they_serve() -> None:
    async with engine("a") as one, engine("b", "c") as other:
        assert await look([one, f"http://{other}/v1"]) == [Engine(one, ("a",)), Engine(other, ("b", "c"))]


async def test_a_model_chooses_among_engines_and_models() -> None:
    async with engine("a", "b") as one, engine("c") as other:
        assert await look([one, other], "b") == [Engine(one, ("b",))]
        with pytest.raises(EngineError, match="--model d: no engine serves it; they serve a, b, c"):
            await look([one, other], "d")


async def test_engines_that_share_only_some_models_need_a_choice() -> None:
    async with engine("base", "adapter") as one, engine("base") as other:
        with pytest.raises(EngineError, match="choose one with --model base"):
            await look([one, other])
        assert len(await look([one, other], "base")) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_dead_port_is_said_in_plain_words(host: str) -> None:
    url = f"http://{host}:{free_port()}"
    with pytest.raises(EngineError) as error:
        await look([url])
    assert str(error.value) == f"{url}/v1/models: connection refused; is the engine running?"


async def test_what_is_no_openai_server_is_said_in_plain_words() -> None:
    async with engine(status=401) as locked, engine(text="<html>") as page, engine() as empty:
        for address, told in ((locked, "answers 401"), (page, "not an OpenAI list"), (empty, "no models")):
            with pytest.raises(EngineError, match=told):
                await look([address])


def test_counting_simulated_engines_beside_own_ones_is_refused() -> None:
    done = CliRunner().invoke(app, ["demo", "--engine", "localhost:8000", "--engines", "2"])
    assert done.exit_code == 1
    assert "leave it out beside --engine" in done.stderr


def test_the_banner_fits_80_columns_and_its_request_is_one_the_shell_understands() -> None:
    lines = banner(port=18080, admin_port=19902, folder=Path("/tmp/extproc-abcdefgh"), model="sim-llama")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 13, "a table of three engines must fit below it on 24 lines"
    start = next(number for number, line in enumerate(lines) if "curl" in line)
    words = shlex.split("\n".join(lines[start : lines.index("", start)]))
    assert words[:3] == ["curl", "-iN", "http://127.0.0.1:18080/v1/chat/completions"]
    assert lines[-1].endswith("extproc explain ID --admin 127.0.0.1:19902")


def test_the_usual_admin_port_need_not_be_said() -> None:
    assert "--admin" not in banner(port=8080, admin_port=9902, folder=Path("/tmp/x"), model="m")[-1]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
async def test_nothing_is_left_when_the_terminal_closes_or_it_is_told_to_stop(
    tmp_path: Path, number: signal.Signals
) -> None:
    ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo", "--engines", "1", *ports),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        try:
            said = await asyncio.wait_for(process.stdout.readuntil(b"explain ID"), 60)
        except asyncio.IncompleteReadError as error:
            pytest.fail(error.partial.decode())
        assert b"starting 1 simulated engine of sim-llama" in said
        assert os.listdir(tmp_path)
        process.send_signal(number)
        rest, _ = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0
    assert b"Traceback" not in rest
    assert os.listdir(tmp_path) == []
