"""An unmodified OpenAI SDK before simulated engines: everything a client does first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from extproc.simulator.faults import Faults
from extproc.simulator.options import Options
from extproc.simulator.presets import PRESETS
from extproc.simulator.server import Handle, serve
from tests.gateway.gateway_process import Gateway, cluster, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

Parts = tuple[Gateway, AsyncOpenAI, dict[str, Handle]]
HELLO = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def parts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    handles = {
        "one": await serve(PRESETS["instant"], "model-one", options=Options(adapters=("lora-a",))),
        "two": await serve(PRESETS["instant"], "model-two"),
    }
    clusters = [
        cluster(name, f"127.0.0.1:{handle.port}", pool=name, model=f"model-{name}")
        for name, handle in handles.items()
    ]
    settings = {
        "default_pool": "one",
        "pools": {"one": {"aliases": {"gpt-4o-mini": "model-one"}, "adapters": ["lora-a"]}},
        "health": {"failures": 10_000},
    }
    try:
        async with (
            running_gateway(tmp_path_factory.mktemp("sdk"), clusters, settings) as gateway,
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client,
        ):
            yield gateway, client, handles
    finally:
        for handle in handles.values():
            await handle.stop()


@pytest.mark.parametrize("model", ["model-one", "model-two", "gpt-4o-mini", "lora-a"])
async def test_chat(parts: Parts, model: str) -> None:
    _, client, _ = parts
    reply = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=5)
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


async def test_chat_streaming_with_usage(parts: Parts) -> None:
    _, client, _ = parts
    stream = await client.chat.completions.create(
        model="model-one", messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) >= 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


async def test_chat_streaming_without_usage_gets_no_extra_chunk(parts: Parts) -> None:
    _, client, _ = parts
    stream = await client.chat.completions.create(
        model="model-one", messages=HELLO, max_tokens=5, stream=True
    )
    assert all([chunk.choices async for chunk in stream])


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]], ids=str)
async def test_completions(parts: Parts, prompt: object) -> None:
    _, client, _ = parts
    reply = await client.completions.create(model="model-two", prompt=prompt, max_tokens=3)  # type: ignore[call-overload]
    assert reply.choices[0].text


async def test_completions_streaming(parts: Parts) -> None:
    _, client, _ = parts
    stream = await client.completions.create(model="model-two", prompt="x", max_tokens=3, stream=True)
    assert len([chunk async for chunk in stream]) >= 1


async def test_embeddings(parts: Parts) -> None:
    _, client, _ = parts
    reply = await client.embeddings.create(model="model-one", input=["a", "b"])
    assert len(reply.data) == 2


async def test_responses(parts: Parts) -> None:
    _, client, _ = parts
    reply = await client.responses.create(model="model-one", input="hello", max_output_tokens=4)
    assert reply.output
    stream = await client.responses.create(model="model-one", input="hello", max_output_tokens=4, stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


async def test_models(parts: Parts) -> None:
    _, client, _ = parts
    ids = {model.id async for model in client.models.list()}
    assert ids == {"model-one", "model-two", "gpt-4o-mini", "lora-a"}
    assert (await client.models.retrieve("model-two")).id == "model-two"


class TestErrors:
    async def test_an_unknown_model(self, parts: Parts) -> None:
        _, client, _ = parts
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nope", messages=HELLO)
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope")

    async def test_a_body_that_cannot_be_routed(self, parts: Parts) -> None:
        _, client, _ = parts
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", cast_to=object, content=b"[]")
        assert caught.value.code == "invalid_request_error"

    async def test_too_large(self, parts: Parts) -> None:
        _, client, _ = parts
        seen: openai.APIError | None = None
        for _ in range(5):
            # Envoy answers while the SDK still writes: now and then the SDK sees the closed connection first.
            with pytest.raises(openai.APIError) as caught:
                await client.chat.completions.create(
                    model="model-one", messages=[{"role": "user", "content": "x" * (70 << 20)}]
                )
            seen = caught.value
            if isinstance(seen, openai.APIStatusError):
                break
        assert isinstance(seen, openai.APIStatusError)
        assert (seen.status_code, seen.code) == (413, "request_too_large")

    async def test_an_engine_that_is_away(self, parts: Parts) -> None:
        _, client, handles = parts
        await handles["two"].set_faults(Faults(refuse=True))
        try:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="model-two", messages=HELLO)
        finally:
            await handles["two"].set_faults(Faults())
        assert caught.value.status_code == 503
        assert caught.value.code in ("gateway_error", "no_capacity")
        assert caught.value.response.headers["retry-after"] == "1"

    async def test_a_busy_engine(self, parts: Parts) -> None:
        _, client, handles = parts
        await handles["two"].set_faults(Faults(status=429))
        try:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="model-two", messages=HELLO)
        finally:
            await handles["two"].set_faults(Faults())

    async def test_a_stream_that_breaks(self, parts: Parts) -> None:
        _, client, handles = parts
        await handles["one"].set_faults(Faults(cut=2))
        try:
            stream = await client.chat.completions.create(
                model="model-one", messages=HELLO, max_tokens=50, stream=True
            )
            with pytest.raises(Exception, match=r"(?i)incomplete|peer closed|connection"):
                async for _ in stream:
                    pass
        finally:
            await handles["one"].set_faults(Faults())


async def test_100_clients_at_once(parts: Parts) -> None:
    gateway, client, _ = parts

    async def one(number: int) -> bool:
        reply = await client.chat.completions.create(
            model=("model-one", "model-two")[number % 2],
            messages=[{"role": "user", "content": f"request {number}"}],
            max_tokens=3,
        )
        return bool(reply.choices)

    assert all(await asyncio.gather(*(one(number) for number in range(100))))
    await gateway.extproc.idle()
