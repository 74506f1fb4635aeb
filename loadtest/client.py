"""A cheap HTTP/1.1 load client: callbacks instead of a task a request, one parser a connection, no body kept.

Rules of this file:

- latency counts from the moment a request was *meant* to be sent: a client or a server that falls behind
  makes the numbers worse instead of hiding the wait (coordinated omission);
- every request ends exactly once: complete, failed, or timed out;
- connections are kept and used again, last used first; above ``max_open`` requests wait, and their clock
  runs;
- times are those of the event loop's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadtest.http_parse import ProtocolError, ResponseParser
from loadtest.report import Histogram

_READ_BYTES = 262_144


@dataclass(slots=True)
class Sample:
    """One request as its client saw it."""

    intended_s: float
    stream: bool = False
    sent_s: float = 0.0
    first_s: float = 0.0
    """First byte of the body; 0 when none came."""
    last_s: float = 0.0
    """Last event or body byte."""
    end_s: float = 0.0
    status: int = 0
    events: int = 0
    body_bytes: int = 0
    error: str = ""
    """Empty, or one of: connect, reset, truncated, timeout, protocol, no_done, http_STATUS."""

    @property
    def ttft_s(self) -> float:
        """From the intended send time to the first body byte."""
        return self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        """From the intended send time to the end of the reply."""
        return self.end_s - self.intended_s

    @property
    def late_s(self) -> float:
        """How much later than intended the client wrote it: the client's own fault or its full pool."""
        return self.sent_s - self.intended_s

    @property
    def tpot_s(self) -> float:
        """Mean time between events after the first one; 0 for fewer than three events."""
        return (self.last_s - self.first_s) / (self.events - 1) if self.events > 2 else 0.0


Done = Callable[[Sample], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send: host, port, TLS, and the path that requests go to."""

    host: str
    port: int
    tls: bool = False
    path: str = "/v1/chat/completions"

    @staticmethod
    def of(url: str) -> Target:
        """From a URL; without a path the chat completions one is meant. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url}: want http://HOST:PORT[/PATH]")
        tls = parts.scheme == "https"
        path = parts.path if parts.path not in ("", "/") else "/v1/chat/completions"
        return Target(parts.hostname, parts.port or (443 if tls else 80), tls, path)

    def request(self, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
        """The bytes of a POST with this JSON body."""
        more = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"content-type: application/json\r\n{more}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class _Connection(asyncio.BufferedProtocol):
    """One connection; carries one exchange at a time."""

    __slots__ = ("_done", "_parser", "_sample", "_timer", "client", "transport")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._sample: Sample | None = None
        self._done: Done | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes, sample: Sample, done: Done) -> None:
        """Write one request and watch its reply."""
        assert self.transport is not None
        self._parser.reset()
        self._sample, self._done = sample, done
        sample.sent_s = self.client.loop.time()
        self._timer = self.client.loop.call_later(self.client.timeout_s, self._expired)
        self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.client.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        # One buffer for all connections: what is read is used up before the loop reads again.
        return self.client.buffer

    def buffer_updated(self, nbytes: int) -> None:
        sample, parser = self._sample, self._parser
        if sample is None:
            self._close("protocol")
            return
        events = parser.events
        body_bytes = parser.body_bytes
        try:
            parser.feed(bytes(self.client.buffer[:nbytes]))
        except (ProtocolError, ValueError):
            self._close("protocol")
            return
        if parser.body_bytes > body_bytes:
            now = self.client.loop.time()
            if not body_bytes:
                sample.first_s = now
                self.client.streaming += 1
            elif parser.events > events and sample.stream:
                self.client.gaps.record(now - sample.last_s)
            sample.last_s = now
        if parser.done:
            self._finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sample is not None:
            if self._parser.eof():
                self._finish("")
            else:
                self._finish("truncated" if self._parser.status else "reset")
        self.client.lost(self)

    def abort(self) -> None:
        """Leave at once; a running exchange ends as timed out."""
        self._close("timeout")

    def _expired(self) -> None:
        self._close("timeout")

    def _close(self, error: str) -> None:
        self._parser.reusable = False
        if self._sample is not None:
            self._finish(error)
        if self.transport is not None:
            self.transport.abort()

    def _finish(self, error: str) -> None:
        sample, done, parser = self._sample, self._done, self._parser
        assert sample is not None
        assert done is not None
        if self._timer is not None:
            self._timer.cancel()
        self._sample = self._done = self._timer = None
        sample.end_s = self.client.loop.time()
        if sample.first_s:
            self.client.streaming -= 1
        sample.status, sample.events, sample.body_bytes = parser.status, parser.events, parser.body_bytes
        if not error and not 200 <= parser.status < 300:
            error = f"http_{parser.status}"
        if not error and sample.stream and not parser.tail.rstrip().endswith(b"[DONE]"):
            error = "no_done"
        sample.error = error
        reusable = parser.reusable and error not in ("truncated", "reset", "timeout", "protocol")
        if not reusable and self.transport is not None:
            self.transport.close()
        done(sample)
        if reusable:
            self.client.idle_again(self)


class Client:
    """Connections to one target. ``submit`` never blocks; the callback comes exactly once for each
    request."""

    def __init__(self, target: Target, *, max_open: int = 10_000, timeout_s: float = 600.0) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.loop = asyncio.get_running_loop()
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self.gaps = Histogram()
        """Seconds between reads that carried tokens, over all streams (inter-token latency)."""
        self.in_flight = 0
        self.streaming = 0
        """Exchanges whose first body byte has come and whose end has not."""
        self._max_open = max_open
        self._open: set[_Connection] = set()
        self._connecting = 0
        self._idle: list[_Connection] = []
        self._waiting: deque[tuple[bytes, Sample, Done]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[None] | None = None
        self._tls = ssl.create_default_context() if target.tls else None

    def submit(self, request: bytes, sample: Sample, done: Done) -> None:
        """Send now, or as soon as a connection is free."""
        self.in_flight += 1

        def ended(ended_sample: Sample) -> None:
            self.in_flight -= 1
            done(ended_sample)

        if self._idle:
            self._idle.pop().send(request, sample, ended)
            return
        self._waiting.append((request, sample, ended))
        if len(self._open) + self._connecting < self._max_open:
            self._start_connecting()

    async def warm(self, connections: int) -> None:
        """Open connections ahead, so that the first requests do not pay for it. Raises OSError."""
        for _ in range(connections - len(self._open)):
            self._idle.append(await self._connect())

    def opened(self, connection: _Connection) -> None:
        """A connection stands."""
        self._open.add(connection)

    def idle_again(self, connection: _Connection) -> None:
        """A connection has finished its exchange and may carry the next."""
        if connection not in self._open:
            return  # lost meanwhile
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """A connection is gone; one that was idle is forgotten, and a waiting request gets a new one."""
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        if self._closed is not None:
            if not self._open and not self._closed.done():
                self._closed.set_result(None)
            return
        if len(self._waiting) > self._connecting and len(self._open) + self._connecting < self._max_open:
            self._start_connecting()

    def abort(self) -> None:
        """End every waiting and running exchange as timed out and close every connection."""
        while self._waiting:
            _, sample, done = self._waiting.popleft()
            sample.end_s = self.loop.time()
            sample.error = "timeout"
            done(sample)
        for connection in list(self._open):
            connection.abort()

    async def close(self) -> None:
        """Abort what runs and wait until the connections are gone."""
        self.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._open:
            self._closed = self.loop.create_future()
            await self._closed

    def _start_connecting(self) -> None:
        self._connecting += 1
        task = self.loop.create_task(self._connect_and_send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> _Connection:
        _, connection = await self.loop.create_connection(
            lambda: _Connection(self), self.target.host, self.target.port, ssl=self._tls
        )
        return connection

    async def _connect_and_send(self) -> None:
        try:
            connection = await self._connect()
        except OSError:
            self._connecting -= 1
            if self._waiting:
                _, sample, done = self._waiting.popleft()
                sample.sent_s = sample.end_s = self.loop.time()
                sample.error = "connect"
                done(sample)
            return
        except asyncio.CancelledError:
            self._connecting -= 1
            raise
        self._connecting -= 1
        self.idle_again(connection)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to send: when (seconds after the start), which bytes, whether its reply is a stream."""

    at_s: float
    request: bytes
    stream: bool = False


async def open_loop(client: Client, shots: Iterator[Shot], *, drain_s: float = 60.0) -> list[Sample]:
    """Send each request at its time, whatever the answers do; returns when all have ended or ``drain_s``
    after the last one was sent (what still runs then is timed out)."""
    samples: list[Sample] = []
    loop = client.loop
    finished = loop.create_future()
    start = loop.time()
    sending = True
    pending = 0
    timer: asyncio.Handle | None = None

    def ended(sample: Sample) -> None:
        nonlocal pending
        samples.append(sample)
        pending -= 1
        if not sending and not pending and not finished.done():
            finished.set_result(None)

    def pump(shot: Shot | None) -> None:
        nonlocal sending, pending, timer
        try:
            while shot is not None:
                due = start + shot.at_s
                if due > loop.time():
                    timer = loop.call_at(due, pump, shot)
                    return
                pending += 1
                client.submit(shot.request, Sample(due, shot.stream), ended)
                shot = next(shots, None)
        except Exception as error:
            if not finished.done():
                finished.set_exception(error)
            return
        sending = False
        timer = loop.call_later(drain_s, client.abort)
        if not pending and not finished.done():
            finished.set_result(None)

    pump(next(shots, None))
    try:
        await finished
    finally:
        if timer is not None:
            timer.cancel()
        if pending:
            client.abort()
    return samples


async def closed_loop(
    client: Client,
    requests: Iterator[tuple[bytes, bool]],
    *,
    concurrency: int,
    count: int | None = None,
    duration_s: float | None = None,
) -> list[Sample]:
    """Keep ``concurrency`` requests running until ``count`` were sent or ``duration_s`` has passed, then
    wait for the last. For latency alone and for saturation; its latencies are *not* those of users that
    arrive on their own. ``requests`` gives (bytes, is a stream) and must not run dry before. Raises
    ValueError without a bound."""
    if count is None and duration_s is None:
        raise ValueError("closed_loop needs a count or a duration")
    samples: list[Sample] = []
    loop = client.loop
    finished = loop.create_future()
    end = loop.time() + duration_s if duration_s is not None else float("inf")
    left = count if count is not None else 1 << 62
    running = 0

    def step() -> None:
        nonlocal left, running
        if left > 0 and loop.time() < end:
            left -= 1
            running += 1
            request, stream = next(requests)
            client.submit(request, Sample(loop.time(), stream), ended)
        elif not running and not finished.done():
            finished.set_result(None)

    def ended(sample: Sample) -> None:
        nonlocal running
        samples.append(sample)
        running -= 1
        loop.call_soon(step)  # by way of the loop: then the connection is free again

    for _ in range(min(concurrency, left)):
        step()
    await finished
    return samples
