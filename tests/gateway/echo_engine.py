"""An engine that records the exact bytes it gets and answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web


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
    """``status`` and ``chunks`` may be changed while it runs."""

    name: str
    port: int = 0
    status: int = 200
    chunks: int = 0
    """0: one JSON reply with usage; more: that many SSE events, then usage and [DONE]."""
    chunk_delay_s: float = 0.0
    received: list[Received] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._websocket(request)
        body = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        self.received.append(Received(request.method, request.path, headers, body))
        usage = {"prompt_tokens": 7, "completion_tokens": max(self.chunks, 1), "total_tokens": 8}
        reply_headers = {"x-engine": self.name}
        if self.status != 200:
            return web.json_response(
                {"error": {"message": "told so"}}, status=self.status, headers=reply_headers
            )
        if not self.chunks:
            return web.json_response(self._reply(usage), headers=reply_headers)
        stream = web.StreamResponse(headers={**reply_headers, "content-type": "text/event-stream"})
        await stream.prepare(request)
        for index in range(self.chunks):
            data = json.dumps({"choices": [{"index": 0, "delta": {"content": f"t{index} "}}]})
            await stream.write(f"data: {data}\n\n".encode())
            if self.chunk_delay_s:
                await asyncio.sleep(self.chunk_delay_s)
        await stream.write(
            f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        )
        await stream.write_eof()
        return stream

    def _reply(self, usage: dict[str, int]) -> dict[str, object]:
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
        return socket


@contextlib.asynccontextmanager
async def running_engine(
    name: str = "echo", *, port: int = 0, host: str = "127.0.0.1"
) -> AsyncIterator[EchoEngine]:
    """Start an echo engine (port 0: a free one), yield it, stop it."""
    engine = EchoEngine(name, port)
    app = web.Application(client_max_size=256 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", engine._handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    engine.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield engine
    finally:
        await runner.cleanup()
