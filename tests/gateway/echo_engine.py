"""An engine that records the exact bytes it gets and answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web

_PROBES = ("/metrics", "/v1/models")
"""What extproc asks by itself; clients' requests for them are not sent to engines."""


@dataclass(slots=True)
class Received:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes


@dataclass(slots=True)
class EchoEngine:
    """What it answers may be changed while it runs. It tells nothing of itself."""

    name: str
    port: int = 0
    status: int = 200
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next requests, before ``status``."""
    reply_headers: dict[str, str] = field(default_factory=dict)
    chunks: int = 0
    """0: one JSON reply with usage; more: that many SSE events, then usage and [DONE]."""
    chunk_delay_s: float = 0.0
    padding: int = 0
    """Bytes of filler in every SSE event."""
    big_reply: int = 0
    """Answer with so many bytes of JSON, in pieces."""
    cut_after: int | None = None
    """Reset the connection after so many SSE events, or before the reply when nothing is streamed."""
    gate: asyncio.Event | None = None
    """Wait for it: before a JSON reply, after the first SSE event, after the first piece of a big reply."""
    silent_start: bool = False
    """With ``gate``: stream the response header, then wait before the first event."""
    received: list[Received] = field(default_factory=list)
    begun: int = 0
    """Inference requests taken so far."""
    active: int = 0
    aborted: int = 0
    """Requests whose client left before the reply was whole."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[Received]:
        """What came with POST."""
        return [item for item in self.received if item.method == "POST"]

    def reset(self) -> None:
        """Answer plainly again; forget what was received."""
        fresh = EchoEngine(self.name, self.port)
        for name in (
            *("status", "statuses", "reply_headers", "chunks", "chunk_delay_s", "padding"),
            *("big_reply", "cut_after", "gate", "silent_start", "received", "begun", "aborted"),
        ):
            setattr(self, name, getattr(fresh, name))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in _PROBES:
            raise web.HTTPNotFound
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._websocket(request)
        self.begun += 1
        self.active += 1
        try:
            body = await request.read()
            headers = {key.lower(): value for key, value in request.headers.items()}
            self.received.append(Received(request.method, request.path_qs, headers, body))
            return await self._answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 7, "completion_tokens": max(self.chunks, 1), "total_tokens": 8}
        reply_headers = {"x-engine": self.name, **self.reply_headers}
        status = self.statuses.pop(0) if self.statuses else self.status
        if status != 200:
            return web.json_response({"error": {"message": "told so"}}, status=status, headers=reply_headers)
        if self.big_reply:
            return await self._big(request, reply_headers)
        if self.chunks:
            return await self._stream(request, reply_headers, usage)
        await self._wait()
        if self.cut_after is not None:
            _reset(request)
        return web.json_response(self._reply(usage), headers=reply_headers)

    async def _stream(
        self, request: web.Request, reply_headers: Mapping[str, str], usage: Mapping[str, int]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={**reply_headers, "content-type": "text/event-stream"})
        await stream.prepare(request)
        if self.silent_start:
            await self._wait()
        for index in range(self.chunks):
            if index == self.cut_after:
                _reset(request)
                return stream
            text = f"t{index} " + "x" * self.padding
            data = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
            await stream.write(f"data: {data}\n\n".encode())
            if index == 0:
                await self._wait()
            if self.chunk_delay_s:
                await asyncio.sleep(self.chunk_delay_s)
        end = json.dumps({"choices": [], "usage": usage})
        await stream.write(f"data: {end}\n\ndata: [DONE]\n\n".encode())
        await stream.write_eof()
        return stream

    async def _big(self, request: web.Request, reply_headers: Mapping[str, str]) -> web.StreamResponse:
        head = b'{"object":"list","usage":{"prompt_tokens":7,"total_tokens":7},"data":["'
        tail = b'"]}'
        stream = web.StreamResponse(headers={**reply_headers, "content-type": "application/json"})
        stream.content_length = self.big_reply
        await stream.prepare(request)
        await stream.write(head)
        left = self.big_reply - len(head) - len(tail)
        while left:
            piece = min(left, 1 << 20)
            await stream.write(b"a" * piece)
            left -= piece
            await self._wait()
        await stream.write(tail)
        await stream.write_eof()
        return stream

    async def _wait(self) -> None:
        if self.gate is not None:
            await self.gate.wait()

    def _reply(self, usage: Mapping[str, int]) -> dict[str, object]:
        message = {"role": "assistant", "content": self.name}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        return socket


def _reset(request: web.Request) -> None:
    """Break the connection in the middle."""
    if request.transport is not None:
        request.transport.abort()


@contextlib.asynccontextmanager
async def running_engine(
    name: str = "echo", *, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[EchoEngine]:
    """Start an echo engine (port 0: a free one), yield it, stop it."""
    engine = EchoEngine(name, port)
    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", engine._handle)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=0.1,
        handler_cancellation=True,  # a client that leaves ends its handler
        auto_decompress=False,  # bodies are recorded as they came
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=1024)
    await site.start()
    engine.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield engine
    finally:
        await runner.cleanup()
