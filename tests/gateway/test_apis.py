"""Every path that engines serve passes, by the model where there is one; what the gateway answers itself; errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.gateway.echo_engine import EchoEngine
from tests.gateway.gateway_process import Lab, chat, cluster, gather_bounded, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")

ODD_NAMES = ("gpt-oss:120b", "org/name", "org/adapter@v1", "name with spaces", "模型")


def clusters(engines: Mapping[str, EchoEngine]) -> list[dict[str, Any]]:
    return [
        cluster("text", engines["text"].address, pool="text", model="text-model"),
        cluster("other", engines["other"].address, pool="other", model=["other-model", *ODD_NAMES]),
    ]


SETTINGS = {
    "default_pool": "text",
    "pools": {"text": {"aliases": {"gpt-4o": "text-model"}}, "other": {"adapters": ["lora-a"]}},
    "health": {"failures": 10_000},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("apis")
    async with running_lab(directory, ("text", "other"), clusters, SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def lab(module_lab: Lab) -> Lab:
    await module_lab.settled()
    return module_lab


WITH_MODEL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": [[1, 2, 3], [4]]},
    "/v1/responses": {"input": [{"role": "user", "content": None}], "instructions": "be brief"},
    "/v1/messages": {"max_tokens": 10, "system": "s", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "q", "documents": ["a", "b"]},
    "/rerank": {"query": "q", "documents": ["a", "b"]},
    "/v2/rerank": {"query": "q", "documents": ["a"]},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/audio/speech": {"input": "say this", "voice": "x"},
    "/v1/images/generations": {"prompt": "a cat"},
    "/openai/deployments/x/chat/completions": {"messages": []},
    "/some/path/nobody/knows": {"anything": 1},
}


@pytest.mark.parametrize("path", WITH_MODEL)
async def test_the_model_decides_where_a_json_request_goes(lab: Lab, path: str) -> None:
    for model, engine in (("text-model", "text"), ("other-model", "other")):
        body = json.dumps({"model": model, **WITH_MODEL[path]}).encode()
        status, headers, reply = await lab.post(body, f"{path}?api-version=2")
        assert (status, headers["x-engine"]) == (200, engine), reply
        received = lab[engine].posts[-1]
        assert (received.path, received.body) == (f"{path}?api-version=2", body)


@pytest.mark.parametrize("model", ODD_NAMES)
async def test_model_names_are_opaque(lab: Lab, model: str) -> None:
    status, headers, reply = await lab.post(chat(model=model))
    assert (status, headers["x-engine"]) == (200, "other"), reply


async def test_a_configured_adapter_goes_to_its_pool(lab: Lab) -> None:
    status, headers, _ = await lab.post(chat(model="lora-a"))
    assert status in (200, 503)
    assert headers.get("x-engine", "other") == "other"


async def test_an_audio_upload_is_routed_by_its_form_field(lab: Lab) -> None:
    for model, engine in (("text-model", "text"), ("other-model", "other")):
        form = aiohttp.FormData()
        form.add_field("file", bytes(range(256)) * 100, filename="a.wav", content_type="audio/wav")
        form.add_field("model", model)
        form.add_field("language", "en")
        async with lab.session.post(lab.url + "/v1/audio/transcriptions", data=form) as reply:
            assert (reply.status, reply.headers["x-engine"]) == (200, engine)
        received = lab[engine].posts[-1]
        assert bytes(range(256)) * 100 in received.body
        assert received.headers["content-type"].startswith("multipart/form-data; boundary=")


class TestWithoutAModel:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/unknown"])
    async def test_the_default_pool_serves(self, lab: Lab, path: str) -> None:
        status, headers, _ = await lab.post(b'{"messages":[]}', path)
        assert (status, headers["x-engine"]) == (200, "text")

    @pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT", "PATCH", "OPTIONS"])
    async def test_every_method_passes(self, lab: Lab, method: str) -> None:
        path = "/v1/responses/resp_1?include=x"
        async with lab.session.request(method, lab.url + path) as reply:
            assert (reply.status, reply.headers["x-engine"]) == (200, "text")
        assert [(item.method, item.path) for item in lab["text"].received] == [(method, path)]

    async def test_binary_bodies_pass(self, lab: Lab) -> None:
        status, _, _ = await lab.post(b"\x00\xff" * 100, "/upload", content_type="application/octet-stream")
        assert status == 200
        assert lab["text"].posts[0].body == b"\x00\xff" * 100

    async def test_bodies_nobody_can_read_still_balance(self, lab: Lab) -> None:
        """They are spread like others (see test_retries for two replicas)."""
        body = b"\x01\x02"
        statuses = {(await lab.post(body, "/x", content_type="application/x-odd"))[0] for _ in range(4)}
        assert statuses == {200}


class TestAnsweredHere:
    async def test_models_of_all_pools(self, lab: Lab) -> None:
        async with lab.session.get(lab.url + "/v1/models") as reply:
            listing = await reply.json()
        assert listing["object"] == "list"
        ids = {item["id"] for item in listing["data"]}
        assert ids == {"text-model", "gpt-4o", "other-model", "lora-a", *ODD_NAMES}
        assert lab["text"].received == lab["other"].received == []

    async def test_one_model(self, lab: Lab) -> None:
        async with lab.session.get(lab.url + "/v1/models/org/name") as reply:
            assert (reply.status, (await reply.json())["id"]) == (200, "org/name")
        async with lab.session.get(lab.url + "/v1/models/none") as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (404, "model_not_found")

    async def test_models_in_anthropics_shape(self, lab: Lab) -> None:
        async with lab.session.get(
            lab.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}
        ) as reply:
            listing = await reply.json()
        assert {item["type"] for item in listing["data"]} == {"model"}
        assert listing["has_more"] is False

    async def test_health(self, lab: Lab) -> None:
        async with lab.session.get(lab.url + "/health") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})


class TestErrors:
    async def test_an_unknown_model_in_openai_shape(self, lab: Lab) -> None:
        status, headers, reply = await lab.post(chat(model="no/such:model"))
        assert (status, headers["content-type"]) == (404, "application/json")
        error = json.loads(reply)["error"]
        assert (error["code"], error["type"], error["param"]) == (
            "model_not_found",
            "invalid_request_error",
            "model",
        )
        assert "text-model" in error["message"]

    async def test_an_unknown_model_in_anthropic_shape(self, lab: Lab) -> None:
        status, _, reply = await lab.post(chat(model="nope"), "/v1/messages")
        answer = json.loads(reply)
        assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")

    async def test_the_name_part_after_a_colon_is_no_adapter(self, lab: Lab) -> None:
        assert (await lab.post(chat(model="gpt-oss:20b")))[0] == 404

    @pytest.mark.parametrize("body", [b"not json", b"[1,2]", b'{"model":"text-model"', b'"text"'])
    async def test_what_is_no_json_object_is_a_400(self, lab: Lab, body: bytes) -> None:
        status, _, reply = await lab.post(body)
        assert (status, json.loads(reply)["error"]["type"]) == (400, "invalid_request_error")
        assert lab["text"].begun == 0

    async def test_errors_of_engines_pass_as_they_are(self, lab: Lab) -> None:
        lab["text"].status = 422
        status, _, reply = await lab.post(chat(model="text-model"))
        assert (status, json.loads(reply)) == (422, {"error": {"message": "told so"}})

    async def test_an_engine_that_breaks_is_a_503_in_the_clients_shape(self, lab: Lab) -> None:
        lab["text"].cut_after = 0
        status, _, reply = await lab.post(chat(model="text-model"))
        assert (status, json.loads(reply)["error"]["type"]) == (503, "gateway_error")
        status, _, reply = await lab.post(chat(model="text-model"), "/v1/messages")
        assert (status, json.loads(reply)["type"]) == (503, "error")


async def test_50_requests_of_every_kind_at_once_keep_apart(lab: Lab) -> None:
    paths = list(WITH_MODEL)

    async def one(number: int) -> bool:
        model, engine = (("text-model", "text"), ("other-model", "other"))[number % 2]
        body = json.dumps({"model": model, "mark": number, **WITH_MODEL[paths[number % len(paths)]]}).encode()
        status, headers, _ = await lab.post(body, paths[number % len(paths)])
        return (status, headers["x-engine"]) == (200, engine)

    assert all(await gather_bounded(200, 50, one))
    marks = sorted(json.loads(item.body)["mark"] for engine in lab.engines.values() for item in engine.posts)
    assert marks == list(range(200))


async def test_a_slow_generation_is_not_cut_by_our_own_times(lab: Lab) -> None:
    """extproc has five seconds to answer; what the engine needs is not counted."""
    gate = asyncio.Event()
    lab["text"].gate = gate
    running = asyncio.create_task(lab.post(chat(model="text-model")))
    await asyncio.sleep(5.5)  # longer than message_timeout: that it does not count is what is tested
    gate.set()
    assert (await running)[0] == 200
