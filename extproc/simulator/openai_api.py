"""The inference endpoints of the simulated engine."""

from __future__ import annotations

import base64
import itertools
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import xxhash
from aiohttp import WSMsgType, web

from extproc.simulator import generation as read
from extproc.simulator import tokens
from extproc.simulator.api_error import ApiError, model_not_found
from extproc.simulator.body import form_model, json_object
from extproc.simulator.dialects import Chat, Completions, Dialect, Messages, Responses, Usage
from extproc.simulator.faults import Faults
from extproc.simulator.generation import Generation
from extproc.simulator.metrics_page import MetricsPage
from extproc.simulator.options import Options
from extproc.simulator.pump import Pump, Ticket
from extproc.simulator.reply import reply_text
from extproc.simulator.sse import Cut, SseWriter, reset

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_AUDIO_TOKENS_PER_BYTE = 1 / 640
"""Whisper hears 50 tokens a second; 16-bit mono at 16 kHz is 32,000 bytes a second."""


class OpenAiApi:
    """Handlers over one pump. ``faults`` is asked anew for every request."""

    def __init__(
        self,
        pump: Pump,
        model: str,
        options: Options,
        max_model_len: int,
        page: MetricsPage,
        faults: Callable[[], Faults],
    ) -> None:
        self._pump = pump
        self._model = model
        self._options = options
        self._max_model_len = max_model_len
        self._page = page
        self._faults = faults
        self._defaults = read.Defaults(options.output_tokens, options.chunk_tokens)
        self._ids = itertools.count(1)

    def routes(self) -> list[web.RouteDef]:
        """All inference routes."""
        post: dict[str, Handler] = {
            "/v1/chat/completions": self._generative(read.chat, Chat),
            "/v1/completions": self._generative(read.completions, Completions),
            "/v1/responses": self._generative(read.responses, Responses),
            "/v1/messages": self._generative(read.messages, Messages),
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/v1/audio/transcriptions": self._transcriptions,
            "/v1/audio/translations": self._transcriptions,
        }
        post |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), self._rerank)
        post |= dict.fromkeys(("/score", "/v1/score"), self._score)
        return [web.post(path, handler) for path, handler in post.items()] + [
            web.get("/v1/realtime", self._realtime)
        ]

    # -- text out

    def _generative(
        self,
        parse: Callable[[dict[str, Any], read.Defaults], Generation],
        dialect: Callable[[str, str, Generation], Dialect],
    ) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await json_object(request)
            model, adapter = self._model_of(body.get("model"))
            wanted = parse(body, self._defaults)
            for prompt in wanted.prompts:
                self._check_length(tokens.count(prompt) + wanted.output_tokens)
            texts = [reply_text(prompt, wanted.output_tokens) for prompt in wanted.prompts]
            answer = dialect(request.headers.get("x-request-id") or str(next(self._ids)), model, wanted)
            tickets: list[Ticket] = []
            ended = "abort"
            try:
                for prompt, text in zip(wanted.prompts, texts, strict=True):
                    tickets.append(self._submit(prompt, text, wanted, adapter))
                if wanted.stream:
                    response = await self._stream(request, answer, wanted, tickets, texts)
                else:
                    for ticket in tickets:
                        await ticket.end()
                    _raise_errors(tickets)
                    whole = answer.whole(texts, _usage(tickets, wanted))
                    response = await self._reply(request, msgspec.json.encode(whole))
                ended = "length" if wanted.limited else "stop"
                return response
            finally:
                for ticket in tickets:
                    self._pump.cancel(ticket)
                    self._page.finished[ended] += 1

        return handle

    async def _stream(
        self,
        request: web.Request,
        answer: Dialect,
        wanted: Generation,
        tickets: list[Ticket],
        texts: list[str],
    ) -> web.StreamResponse:
        """Events as the tokens come; several prompts one after another."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        writer = SseWriter(request, response, self._faults(), wanted.separate)
        width = wanted.chunk_tokens
        opened = False
        try:
            for index, (ticket, text) in enumerate(zip(tickets, texts, strict=True)):
                sent = 0
                while sent < wanted.output_tokens:
                    visible = await ticket.more(sent + width - 1 if opened else 0)
                    _raise_errors([ticket])
                    events = [] if opened else answer.opening(_usage(tickets, wanted, made=0))
                    opened = True
                    while sent < visible:
                        end = min(sent + width, wanted.output_tokens)
                        if end > visible:
                            break
                        part = text[sent * tokens.TOKEN_BYTES : end * tokens.TOKEN_BYTES]
                        events.append(answer.delta(index, part, end == wanted.output_tokens))
                        sent = end
                    await writer.send(events)
            await writer.send(answer.closing(texts, _usage(tickets, wanted)))
        except ApiError as error:
            await writer.send([b"data: " + error.body() + b"\n\n", b"data: [DONE]\n\n"])
        except Cut:
            return response
        await response.write_eof()
        return response

    def _submit(self, prompt: bytes, text: str, wanted: Generation, adapter: str | None) -> Ticket:
        # The last token of a reply is never written to the KV cache, so it fills no block.
        held = prompt + text.encode()[: -tokens.TOKEN_BYTES]
        size = self._pump.engine.profile.block_size
        hashes = tokens.block_hashes(held, size, adapter, wanted.salt)
        return self._pump.submit(
            held,
            hashes,
            tokens.count(prompt),
            wanted.output_tokens,
            adapter=adapter,
            salt=wanted.salt,
            priority=wanted.priority,
            streaming=wanted.stream,
        )

    # -- numbers out

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        """``dimensions`` floats an input (8 unless said), as numbers or base64."""
        body = await json_object(request)
        model, adapter = self._model_of(body.get("model"))
        prompts = read.prompts_of(body.get("input"))
        dimensions = body.get("dimensions") or 8
        if not isinstance(dimensions, int) or dimensions < 1:
            raise ApiError(400, "dimensions must be a positive integer", param="dimensions")
        await self._prefill(prompts, adapter)
        data = []
        for index, prompt in enumerate(prompts):
            value = _number(prompt)
            embedding: object = [value] * dimensions
            if body.get("encoding_format") == "base64":
                embedding = base64.b64encode(struct.pack("<f", value) * dimensions).decode()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        used = sum(map(tokens.count, prompts))
        usage = {"prompt_tokens": used, "total_tokens": used}
        reply = {"object": "list", "model": model, "data": data, "usage": usage}
        return await self._reply(request, msgspec.json.encode({"id": f"embd-{next(self._ids)}"} | reply))

    async def _rerank(self, request: web.Request) -> web.StreamResponse:
        body = await json_object(request)
        model, adapter = self._model_of(body.get("model"))
        documents = body.get("documents")
        if not isinstance(documents, list) or not documents:
            raise ApiError(400, "documents must be a list", param="documents")
        prompts = [_pair(body.get("query"), document) for document in documents]
        await self._prefill(prompts, adapter)
        results = [
            {"index": index, "document": {"text": document}, "relevance_score": _number(prompt)}
            for index, (document, prompt) in enumerate(zip(documents, prompts, strict=True))
        ]
        results.sort(key=lambda one: -float(one["relevance_score"]))  # type: ignore[arg-type]
        usage = {"total_tokens": sum(map(tokens.count, prompts))}
        reply = {"id": f"rerank-{next(self._ids)}", "model": model, "usage": usage, "results": results}
        return await self._reply(request, msgspec.json.encode(reply))

    async def _score(self, request: web.Request) -> web.StreamResponse:
        body = await json_object(request)
        model, adapter = self._model_of(body.get("model"))
        first = _as_list(body.get("text_1", body.get("queries")))
        second = _as_list(body.get("text_2", body.get("documents")))
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise ApiError(400, "text_1 and text_2 must be of equal length")
        prompts = [_pair(one, other) for one, other in zip(first, second, strict=True)]
        await self._prefill(prompts, adapter)
        data = [
            {"index": index, "object": "score", "score": _number(prompt)}
            for index, prompt in enumerate(prompts)
        ]
        used = sum(map(tokens.count, prompts))
        usage = {"prompt_tokens": used, "total_tokens": used}
        reply = {"object": "list", "model": model, "data": data, "usage": usage}
        return await self._reply(request, msgspec.json.encode({"id": f"score-{next(self._ids)}"} | reply))

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await json_object(request)
        self._model_of(body.get("model"))
        if isinstance(body.get("messages"), list):
            pieces = tokens.chat_pieces(
                body["messages"],
                body.get("tools"),
                generation_prompt=bool(body.get("add_generation_prompt", True)),
            )
            ids = tokens.to_ids(tokens.tokenise(pieces))
        elif isinstance(body.get("prompt"), str):
            ids = tokens.to_ids(tokens.tokenise(tokens.text_pieces(body["prompt"])))
        else:
            raise ApiError(400, "either prompt or messages is needed")
        reply = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids}
        return await self._reply(request, msgspec.json.encode(reply | {"token_strs": None}))

    async def _transcriptions(self, request: web.Request) -> web.StreamResponse:
        """Any multipart form with a model field and some bytes of audio."""
        raw = await request.read()
        if not request.content_type.startswith("multipart/"):
            raise ApiError(400, "a multipart form is expected")
        self._model_of(form_model(raw))
        heard = max(1, min(int(len(raw) * _AUDIO_TOKENS_PER_BYTE), 1500))
        prompt = (xxhash.xxh3_64_digest(raw) * heard)[: heard * tokens.TOKEN_BYTES]
        await self._prefill([prompt], None)
        usage = {"type": "duration", "seconds": heard // 50 + 1}
        reply = {"text": reply_text(prompt, 16), "usage": usage}
        return await self._reply(request, msgspec.json.encode(reply))

    async def _realtime(self, request: web.Request) -> web.StreamResponse:
        """A WebSocket that says back what it hears."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        return socket

    async def _prefill(self, prompts: list[bytes] | tuple[bytes, ...], adapter: str | None) -> None:
        """Let the engine read the prompts, without output."""
        tickets: list[Ticket] = []
        size = self._pump.engine.profile.block_size
        ended = "abort"
        try:
            for prompt in prompts:
                one = prompt or b"\0\0\0\0"
                self._check_length(tokens.count(one))
                hashes = tokens.block_hashes(one, size, adapter, "")
                tickets.append(
                    self._pump.submit(
                        one,
                        hashes,
                        tokens.count(one),
                        0,
                        adapter=adapter,
                        salt="",
                        priority=0,
                        streaming=False,
                    )
                )
            for ticket in tickets:
                await ticket.end()
            _raise_errors(tickets)
            ended = "stop"
        finally:
            for ticket in tickets:
                self._pump.cancel(ticket)
                self._page.finished[ended] += 1

    # -- what they share

    def _model_of(self, asked: object) -> tuple[str, str | None]:
        """The served name and the adapter, if it is one. Like vLLM, no model means the base model."""
        if asked is None or asked == "" or asked == self._model:
            return self._model, None
        if asked in self._options.adapters:
            return str(asked), str(asked)
        raise model_not_found(str(asked))

    def _check_length(self, asked: int) -> None:
        if asked > self._max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. "
                f"However, you requested {asked} tokens. Please reduce the length of the input or output.",
            )

    async def _reply(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """A JSON reply; the ``cut`` fault sends half of it."""
        if self._faults().cut is None:
            return web.Response(body=body, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = len(body)
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        reset(request.transport)
        return response


def _usage(tickets: list[Ticket], wanted: Generation, made: int | None = None) -> Usage:
    prompt = sum(map(tokens.count, wanted.prompts))
    completion = wanted.output_tokens * len(tickets) if made is None else made
    return Usage(prompt, completion, sum(ticket.cached or 0 for ticket in tickets))


def _raise_errors(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        if ticket.error is not None:
            raise ApiError(400, ticket.error)


def _number(prompt: bytes) -> float:
    """A number from 0 to 1 for a prompt; the same for the same prompt."""
    return (xxhash.xxh3_64_intdigest(prompt) >> 40) / (1 << 24)


def _pair(query: object, document: object) -> bytes:
    return tokens.tokenise([str(query).encode("utf-8", "replace"), str(document).encode("utf-8", "replace")])


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]
