"""The cheapest engine there is: reads a request to its end and answers what the request asked for.

    python -m loadtest.responder --port 9001 --port 9002

The header ``x-loadtest-reply`` says which answer: nothing or ``json`` (a chat completion with usage), or
``chunks=N,interval_ms=T``: N server-sent events, ``T`` ms apart (0: as fast as the connection takes them),
then usage and ``[DONE]``. ``GET /metrics`` shows an idle vLLM, ``GET /health`` is fine. Nothing of a prompt
is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from dataclasses import dataclass

_USAGE = '"usage":{"prompt_tokens":1000,"completion_tokens":16,"total_tokens":1016}'
_TOKEN = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_END = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
    + _USAGE.encode()
    + b"}\n\n"
    b"data: [DONE]\n\n"
)
_JSON = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"word word word"},"finish_reason":"stop"}],' + _USAGE.encode() + b"}"
)
_METRICS = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m",engine="0"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.0
"""
_BURST = 64
"""Events in one write when no interval is asked: between writes the loop serves others."""


def _full(body: bytes, kind: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


_ANSWER_JSON = _full(_JSON, "application/json")
_ANSWER_METRICS = _full(_METRICS, "text/plain; version=0.0.4")
_ANSWER_HEALTH = _full(b"", "text/plain")
_ANSWER_MODELS = _full(b'{"object":"list","data":[{"id":"m","object":"model"}]}', "application/json")
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHUNK_TOKEN = _chunk(_TOKEN)
_CHUNK_END = _chunk(_END) + b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply a request asks for."""

    chunks: int = 0
    """0: one JSON body."""
    interval_s: float = 0.0

    def header(self) -> tuple[tuple[str, str], ...]:
        """The request header that asks for it."""
        if not self.chunks:
            return ()
        return (("x-loadtest-reply", f"chunks={self.chunks},interval_ms={self.interval_s * 1e3:g}"),)

    @staticmethod
    def parse(value: str) -> Reply:
        """From the header's value; what is not understood asks for JSON."""
        fields = dict(part.split("=", 1) for part in value.split(",") if "=" in part)
        try:
            return Reply(int(fields.get("chunks", "0")), float(fields.get("interval_ms", "0")) / 1e3)
        except ValueError:
            return Reply()


class _Engine(asyncio.Protocol):
    """One connection: requests one after another, as Envoy sends them."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._left = -1
        """Body bytes still to come; -1 while the head is read."""
        self._path = b""
        self._reply = Reply()
        self._to_send = 0
        self._next: asyncio.Handle | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._to_send = 0
        if self._next is not None:
            self._next.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._to_send and self._next is None:
            self._stream()

    def data_received(self, data: bytes) -> None:
        if self._left >= 0:
            self._left -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > 65_536:
                    self._abort()
                return
            if not self._read_head(self._head[:end]):
                self._abort()
                return
            self._left -= len(self._head) - end - 4
            self._head = b""
        if self._left <= 0:
            self._left = -1
            self._answer()

    def _read_head(self, head: bytes) -> bool:
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ")
        if len(parts) != 3:
            return False
        self._path = parts[1]
        self._left = 0
        self._reply = Reply()
        for line in lines:
            name, _, value = line.partition(b":")
            name = name.lower()
            if name == b"content-length":
                if not value.strip().isdigit():
                    return False
                self._left = int(value)
            elif name == b"x-loadtest-reply":
                self._reply = Reply.parse(value.strip().decode("latin-1"))
            elif name == b"transfer-encoding":
                return False  # a load client always says the length, and Envoy keeps it
        return True

    def _answer(self) -> None:
        assert self._transport is not None
        if self._path.startswith(b"/metrics"):
            self._transport.write(_ANSWER_METRICS)
        elif self._path == b"/health":
            self._transport.write(_ANSWER_HEALTH)
        elif self._path == b"/v1/models":
            self._transport.write(_ANSWER_MODELS)
        elif not self._reply.chunks:
            self._transport.write(_ANSWER_JSON)
        else:
            self._to_send = self._reply.chunks
            self._transport.write(_STREAM_HEAD)
            self._stream()

    def _stream(self) -> None:
        assert self._transport is not None
        self._next = None
        if self._paused:
            return
        now = 1 if self._reply.interval_s else min(self._to_send, _BURST)
        self._to_send -= now
        if not self._to_send:
            self._transport.write(_CHUNK_TOKEN * now + _CHUNK_END)
            return
        self._transport.write(_CHUNK_TOKEN * now)
        loop = asyncio.get_running_loop()
        if self._reply.interval_s:
            self._next = loop.call_later(self._reply.interval_s, self._stream)
        else:
            self._next = loop.call_soon(self._stream)

    def _abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()


async def serve(host: str, ports: list[int]) -> None:
    """Answer on these ports until SIGTERM or SIGINT. Raises OSError when a port is taken."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    servers = [await loop.create_server(_Engine, host, port, backlog=4096) for port in ports]
    print("ready", flush=True)
    await stop.wait()
    for server in servers:
        server.close()


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.responder",
        description="cheap engine for benchmarks: canned JSON or N events",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, action="append", required=True, help="may be given several times")
    given = parser.parse_args()
    asyncio.run(serve(given.host, given.port))


if __name__ == "__main__":
    main()
