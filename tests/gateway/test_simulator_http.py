"""The simulated engine's HTTP front, over real sockets and without a gateway."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from openai import AsyncOpenAI

from extproc.simulator.faults import Faults
from extproc.simulator.kv_wire import KvWire
from extproc.simulator.options import Options
from extproc.simulator.presets import PRESETS
from extproc.simulator.profile import Profile
from extproc.simulator.server import Handle, serve

INSTANT = PRESETS["instant"]
ENDLESS = Profile(prefill_tokens_per_s=1e6, decode_base_s=0.05, kv_blocks=4096)
"""20 tokens a second: a long reply does not end within a test."""

Start = Callable[..., Awaitable[Handle]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts simulated engines that end with the test."""
    handles: list[Handle] = []

    async def begin(profile: Profile = INSTANT, **options: Any) -> Handle:
        handles.append(await serve(profile, "sim", options=Options(**options)))
        return handles[-1]

    yield begin
    for handle in handles:
        await handle.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


def url(handle: Handle, path: str) -> str:
    return f"http://127.0.0.1:{handle.port}{path}"


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | more


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, for at most ten seconds."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """The data of every SSE event; [DONE] as text."""
    lines = (await response.text()).split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def samples(http: aiohttp.ClientSession, handle: Handle) -> dict[str, float]:
    async with http.get(url(handle, "/metrics")) as response:
        text = await response.text()
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


async def test_chat_reply_has_text_and_usage(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    async with http.post(url(engine, "/v1/chat/completions"), json=chat()) as response:
        reply = await response.json()
    assert len(reply["choices"][0]["message"]["content"]) == 4 * 8
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 8
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_same_prompt_gets_the_same_reply(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    texts = set()
    for _turn in range(2):
        async with http.post(url(engine, "/v1/chat/completions"), json=chat()) as response:
            texts.add((await response.json())["choices"][0]["message"]["content"])
    assert len(texts) == 1


@pytest.mark.parametrize(("chunk_tokens", "chunks"), [(1, 1000), (100, 10), (300, 4)])
async def test_a_stream_has_the_asked_number_of_chunks(
    start: Start, http: aiohttp.ClientSession, chunk_tokens: int, chunks: int
) -> None:
    engine = await start()
    body = chat(max_tokens=1000, stream=True, chunk_tokens=chunk_tokens)
    async with http.post(url(engine, "/v1/chat/completions"), json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = await events_of(response)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1] == "[DONE]"
    assert len(events) == 1 + chunks + 1
    text = "".join(event["choices"][0]["delta"]["content"] for event in events[1:-1])
    assert len(text) == 4000


async def test_usage_ends_a_stream_when_asked_for(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = chat(stream=True, stream_options={"include_usage": True})
    async with http.post(url(engine, "/v1/chat/completions"), json=body) as response:
        events = await events_of(response)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 8


async def test_the_next_turn_finds_prompt_and_reply_cached(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    messages = [{"role": "user", "content": "tell me a long story " * 20}]
    async with http.post(
        url(engine, "/v1/chat/completions"), json=chat(messages=messages, max_tokens=100)
    ) as response:
        first = await response.json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    async with http.post(url(engine, "/v1/chat/completions"), json=chat(messages=messages)) as response:
        second = await response.json()
    held = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == held // 16 * 16


async def test_min_tokens_lengthens_a_reply(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    async with http.post(url(engine, "/v1/chat/completions"), json=chat(min_tokens=20)) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(
    "prompt", ["hello", [1, 2, 3], ["hello", "there"], [[1, 2], [3]]], ids=["text", "ids", "texts", "lists"]
)
async def test_completions_take_every_form_of_prompt(
    start: Start, http: aiohttp.ClientSession, prompt: object
) -> None:
    engine = await start()
    body = {"model": "sim", "prompt": prompt, "max_tokens": 3}
    async with http.post(url(engine, "/v1/completions"), json=body) as response:
        choices = (await response.json())["choices"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice["index"] for choice in choices] == ([0, 1] if several else [0])


async def test_the_openai_sdk_reads_chat_completions_responses_and_embeddings(start: Start) -> None:
    engine = await start()
    async with AsyncOpenAI(base_url=url(engine, "/v1"), api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            **chat(), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8
        text = await client.completions.create(model="sim", prompt="hello", max_tokens=4)
        assert len(text.choices[0].text) == 16
        response = await client.responses.create(model="sim", input="hello")
        assert len(response.output_text) == 4 * 64
        kinds = [
            event.type async for event in await client.responses.create(model="sim", input="x", stream=True)
        ]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        embeddings = await client.embeddings.create(model="sim", input=["a", "b"], dimensions=5)
        assert [len(one.embedding) for one in embeddings.data] == [5, 5]
        assert [model.id async for model in client.models.list()] == ["sim"]


async def test_messages_stream_in_anthropics_shape(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    async with http.post(url(engine, "/v1/messages"), json=chat(stream=True)) as response:
        events = await events_of(response)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 8,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["usage"]["output_tokens"] == 8


async def test_rerank_score_and_tokenize(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body: dict[str, Any] = {"model": "sim", "query": "q", "documents": ["a", "b", "c"]}
    async with http.post(url(engine, "/rerank"), json=body) as response:
        assert sorted(one["index"] for one in (await response.json())["results"]) == [0, 1, 2]
    body = {"model": "sim", "text_1": "q", "text_2": ["a", "b"]}
    async with http.post(url(engine, "/score"), json=body) as response:
        assert len((await response.json())["data"]) == 2
    async with http.post(url(engine, "/tokenize"), json={"model": "sim", "prompt": "abcdefgh"}) as response:
        assert (await response.json())["tokens"] == list(struct.unpack("<2I", b"abcdefgh"))


async def test_a_huge_embedding_reply(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = {"model": "sim", "input": "hello", "dimensions": 2_000_000}
    async with http.post(url(engine, "/v1/embeddings"), json=body) as response:
        assert len(await response.read()) > 20_000_000


async def test_audio_is_taken_as_multipart(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    form = aiohttp.FormData({"model": "sim"})
    form.add_field("file", b"RIFF" + bytes(50_000), filename="a.wav", content_type="audio/wav")
    async with http.post(url(engine, "/v1/audio/transcriptions"), data=form) as response:
        assert "text" in await response.json()


async def test_a_websocket_says_back_what_it_hears(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    async with http.ws_connect(url(engine, "/v1/realtime")) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
        await socket.send_bytes(b"\x00\xff")
        assert await socket.receive_bytes() == b"\x00\xff"


async def test_errors_have_vllms_shape(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(max_model_len=100)
    for body, status in [(chat(model="other"), 404), (chat(max_tokens=1000), 400), (chat(messages=3), 400)]:
        async with http.post(url(engine, "/v1/chat/completions"), json=body) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == status
    async with http.get(url(engine, "/nowhere")) as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})


async def test_adapters_are_models_with_a_parent(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(adapters=("french",))
    async with http.get(url(engine, "/v1/models")) as response:
        models = (await response.json())["data"]
    assert [(one["id"], one["parent"]) for one in models] == [("sim", None), ("french", "sim")]
    async with http.post(url(engine, "/v1/chat/completions"), json=chat(model="french")) as response:
        assert (await response.json())["model"] == "french"


async def test_metrics_count_what_happened(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    text = "the same long prompt " * 10
    for _turn in range(2):
        async with http.post(url(engine, "/v1/chat/completions"), json=chat(text)) as response:
            prompt = (await response.json())["usage"]["prompt_tokens"]
    found = await samples(http, engine)
    labels = 'engine="0",model_name="sim"'
    assert found[f"vllm:prompt_tokens_total{{{labels}}}"] == 2 * prompt
    computed = found[f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}}']
    assert 2 * prompt - computed == (prompt - 1) // 16 * 16
    assert found[f"vllm:generation_tokens_total{{{labels}}}"] == 16
    assert found[f"vllm:time_to_first_token_seconds_count{{{labels}}}"] == 2
    assert found[f'vllm:request_success_total{{{labels},finished_reason="length"}}'] == 2
    assert found[f"vllm:num_requests_running{{{labels}}}"] == 0


async def test_a_client_that_leaves_frees_its_memory(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(ENDLESS)
    async with http.post(
        url(engine, "/v1/chat/completions"), json=chat(max_tokens=10_000, stream=True)
    ) as response:
        await response.content.readline()
        assert engine.engine.metrics(asyncio.get_running_loop().time()).running == 1
        response.close()
    await until(lambda: engine.engine.counters.aborted == 1)
    metrics = engine.engine.metrics(asyncio.get_running_loop().time())
    assert (metrics.running, metrics.kv_usage) == (0, 0)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_requests_are_recorded_byte_for_byte(
    start: Start, http: aiohttp.ClientSession, encoding: str
) -> None:
    engine = await start(record=5)
    body = b'{ "messages":[{"content":"\\u00e9 \xc3\xa9","role":"user"}],"big":12345678901234567890,  "x":1}'
    sent = gzip.compress(body) if encoding == "gzip" else body
    headers = {"content-type": "application/json", "content-encoding": encoding, "x-mine": "1"}
    async with http.post(url(engine, "/v1/chat/completions?a=b"), data=sent, headers=headers) as response:
        assert response.status == 200
    async with http.get(url(engine, "/_sim/requests?limit=1")) as response:
        (seen,) = await response.json()
    assert base64.b64decode(seen["body_base64"]) == sent
    assert seen["sha256"] == hashlib.sha256(sent).hexdigest()
    assert seen["target"] == "/v1/chat/completions?a=b"
    assert ["x-mine", "1"] in [[name.lower(), value] for name, value in seen["headers"]]


async def test_fault_status_meets_inference_only(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    async with http.post(url(engine, "/_sim/faults"), json={"status": 503}) as response:
        assert (await response.json())["status"] == 503
    async with http.post(url(engine, "/v1/chat/completions"), json=chat()) as response:
        assert response.status == 503
    async with http.get(url(engine, "/health")) as response:
        assert response.status == 200
    async with http.delete(url(engine, "/_sim/faults")):
        pass
    async with http.post(url(engine, "/v1/chat/completions"), json=chat()) as response:
        assert response.status == 200


async def test_fault_refuse_resets_and_refuses_until_lifted(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await start(ENDLESS, control_port=0)
    control = f"http://127.0.0.1:{engine.control_port}/_sim/faults"
    async with http.post(
        url(engine, "/v1/chat/completions"), json=chat(max_tokens=10_000, stream=True)
    ) as response:
        await response.content.readline()
        async with http.post(control, json={"refuse": True}):
            pass
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(url(engine, "/health"))
    async with http.delete(control):
        pass
    async with http.get(url(engine, "/health")) as response:
        assert response.status == 200


async def test_fault_hang_never_answers(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(faults=Faults(hang=True))
    with pytest.raises(TimeoutError):
        await http.get(url(engine, "/health"), timeout=aiohttp.ClientTimeout(total=0.2))


@pytest.mark.parametrize("stream", [True, False])
async def test_fault_cut_resets_in_the_middle(
    start: Start, http: aiohttp.ClientSession, stream: bool
) -> None:
    engine = await start(faults=Faults(cut=3))
    async with http.post(url(engine, "/v1/chat/completions"), json=chat(stream=stream)) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_faults_of_metrics(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(faults=Faults(freeze_metrics=True))
    before = await samples(http, engine)
    async with http.post(url(engine, "/v1/chat/completions"), json=chat()):
        pass
    assert await samples(http, engine) == before
    await engine.set_faults(Faults(garbage_metrics=True))
    async with http.get(url(engine, "/metrics")) as response:
        assert (response.status, "<html>" in await response.text()) == (200, True)
    await engine.set_faults(Faults(no_metrics=True))
    async with http.get(url(engine, "/metrics")) as response:
        assert response.status == 404


async def test_fault_slow_slows_the_engine(start: Start) -> None:
    engine = await start(faults=Faults(slow=4.0))
    assert engine.engine.slowdown == 4.0


async def test_an_unknown_fault_is_refused(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    async with http.post(url(engine, "/_sim/faults"), json={"explode": True}) as response:
        assert response.status == 400
        assert "explode" in await response.text()


def read_batch(payload: bytes) -> list[dict[str, Any]]:
    """Events of a batch of any generation as maps."""
    batch = msgspec.msgpack.decode(payload)
    events = batch["events"] if isinstance(batch, dict) else batch[1]
    names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
    return [event if isinstance(event, dict) else dict(zip(names, event, strict=False)) for event in events]


@pytest.mark.parametrize("wire", list(KvWire))
async def test_kv_events_are_published_and_replayed(
    start: Start, http: aiohttp.ClientSession, wire: KvWire
) -> None:
    engine = await start(kv_events_port=0, kv_wire=wire)
    async with http.get(url(engine, "/kv_event_sources")) as response:
        (source,) = (await response.json()).values()
    context = zmq.asyncio.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(source["endpoint"])
        subscriber.subscribe(b"")
        body = {"model": "sim", "prompt": list(range(40)), "max_tokens": 1}
        # The subscription is there once a message comes through; the replay has those it missed.
        async with asyncio.timeout(10):
            while not await subscriber.poll(50):
                async with http.post(url(engine, "/v1/completions"), json=body):
                    pass
                async with http.post(url(engine, "/reset_prefix_cache")) as response:
                    assert response.status == 200
            topic, sequence, payload = await subscriber.recv_multipart()
        request = context.socket(zmq.DEALER)
        request.connect(source["replay_endpoint"])
        await request.send_multipart([b"", (0).to_bytes(8, "big")])
        replayed = []
        async with asyncio.timeout(10):
            while True:
                *_, number, batch = await request.recv_multipart()
                if number == (-1).to_bytes(8, "big", signed=True):
                    break
                replayed.append((number, batch))
        assert (sequence, payload) in replayed
        assert topic == b""
        assert [int.from_bytes(number, "big") for number, _batch in replayed] == list(range(len(replayed)))
        stored = read_batch(replayed[0][1])[0]
        assert stored["type"] == "BlockStored"
        assert stored["token_ids"] == list(range(32))
        assert stored["parent_block_hash"] is None
        assert (stored["block_size"], stored["medium"]) == (16, "GPU")
        assert len(stored["block_hashes"]) == 2
        assert read_batch(replayed[1][1])[0]["type"] == "AllBlocksCleared"
    finally:
        context.destroy(linger=0)


async def test_the_process_tells_its_port_and_ends_on_sigterm(http: aiohttp.ClientSession) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc.simulator", "--port", "0", "--model", "tiny", "--preset", "instant",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        address = line.removeprefix("listening on ").strip()
        async with http.get(f"http://{address}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_profile_field_that_is_not_there_is_said_in_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "extproc.simulator", "--set", "speed=3", stderr=asyncio.subprocess.PIPE
    )
    _out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert err.decode().startswith("simulator: --set speed: no such field")
