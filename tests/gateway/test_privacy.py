"""What clients write in prompts and send as keys is nowhere to be found afterwards."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.gateway.gateway_process import Lab, chat, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARK = "zq7-canary-prompt-zq7"
KEY = "sk-zq7-canary-key"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    settings = {
        "pools": {"pool": {"aliases": {"alias": "m"}}},
        "decisions": {"log": "decisions.jsonl"},
        "logging": {"level": "debug", "requests": True},
        "responses": {"headers": True},
        "health": {"failures": 10_000},
    }
    async with running_lab(tmp_path_factory.mktemp("privacy"), ("a", "b"), settings=settings) as running:
        yield running


def bodies() -> list[tuple[str, bytes, dict[str, str]]]:
    text = f"tell me about {MARK} " * 20
    return [
        ("/v1/chat/completions", chat(text), {}),
        ("/v1/chat/completions", chat(text, model="alias", stream=True, user=MARK), {}),
        ("/v1/chat/completions", chat(text, model=None, tools=[{"function": {"name": MARK}}]), {}),
        ("/v1/completions", json.dumps({"model": "m", "prompt": text}).encode(), {}),
        ("/v1/messages", json.dumps({"model": "m", "system": text, "messages": []}).encode(), {}),
        ("/v1/embeddings", json.dumps({"model": "m", "input": [text]}).encode(), {}),
        ("/v1/chat/completions", gzip.compress(chat(text)), {"content_encoding": "gzip"}),
        # What goes wrong must not be more talkative.
        ("/v1/chat/completions", text.encode(), {}),
        ("/v1/chat/completions", chat(text)[:-5], {}),
        ("/v1/chat/completions", gzip.compress(chat(text))[:-20], {"content_encoding": "gzip"}),
        (
            "/v1/chat/completions",
            b'{"model":"m","messages":[{"content":"\\ud800 ' + text.encode() + b'"}]}',
            {},
        ),
        ("/v1/chat/completions", json.dumps({"model": "m", "messages": {MARK: text}}).encode(), {}),
        ("/v1/chat/completions", chat(text, model="unknown-model"), {}),
        (f"/v1/chat/completions?secret={MARK}", chat(text), {}),
        (f"/unknown/{MARK}", text.encode(), {"content_type": "text/plain"}),
    ]


async def test_no_prompt_and_no_key_in_logs_pages_and_records(lab: Lab) -> None:
    keys = {"authorization": f"Bearer {KEY}", "x_api_key": KEY, "cookie": f"s={KEY}"}
    for path, body, headers in bodies():
        await lab.post(body, path, **headers, **keys)
    lab["a"].status = lab["b"].status = 500
    await lab.post(chat(MARK), **keys)
    await lab.extproc.idle()
    places = {"extproc.log": lab.extproc.log, "envoy.log": lab.gateway.envoy.log}
    async with aiohttp.ClientSession() as session:
        for page in ("/metrics", "/decisions?count=100", "/fleet", "/config", "/readyz"):
            async with session.get(lab.extproc.admin_url + page) as reply:
                places[page] = await reply.text()
    await lab.extproc.child.stop()  # the decision log is written by a thread: ends whole
    files = [path for path in lab.gateway.directory.rglob("*") if path.is_file()]
    assert Path(lab.gateway.directory / "decisions.jsonl") in files
    for path in files:
        places[str(path)] = path.read_bytes().decode(errors="replace")
    assert len(places["/decisions?count=100"]) > 5000
    assert len(places[str(lab.gateway.directory / "decisions.jsonl")].splitlines()) >= 10
    for secret in (MARK, KEY, base64.b64encode(MARK.encode())[:-4].decode()):
        for place, text in places.items():
            found = text.find(secret)
            assert found < 0, f"{place}: …{text[max(0, found - 200) : found + 40]}…"
