"""Read one HTTP/1.1 response at a time with as little work a byte as Python allows (RFC 9112).

Rules of this file:

- bytes come in as the socket gives them; a response may be cut anywhere;
- only what a load client needs is kept: status, whether the connection may be used again, body bytes,
  server-sent events (counted by their blank line) and the last few body bytes;
- no body is stored: thousands of streams cost the memory of their parsers.
"""

from __future__ import annotations

from enum import Enum

TAIL_BYTES = 24
"""How many last body bytes are kept: enough to see ``data: [DONE]`` and its blank line."""

MAX_HEAD_BYTES = 65_536
MAX_CHUNK_LINE_BYTES = 1_024


class ProtocolError(Exception):
    """The peer does not speak HTTP/1.1, or says more than its head may."""


class _State(Enum):
    HEAD = 0
    LENGTH = 1
    CHUNKED = 2
    TRAILERS = 3
    UNTIL_CLOSE = 4
    DONE = 5


class ResponseParser:
    """One response. ``feed`` until ``done``; ``reset`` before the next one on the same connection."""

    __slots__ = ("_left", "_rest", "_skip", "_state", "body_bytes", "events", "reusable", "status", "tail")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the last response and wait for the next head."""
        self.status = 0
        self.reusable = True
        """Whether the connection may carry another request (no ``connection: close``, body has an end)."""
        self.body_bytes = 0
        self.events = 0
        """Server-sent events seen so far (blank lines in the body)."""
        self.tail = b""
        self._state = _State.HEAD
        self._left = 0
        self._skip = 0
        self._rest = b""

    @property
    def done(self) -> bool:
        """Whether the response is complete."""
        return self._state is _State.DONE

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises ProtocolError on what is no HTTP/1.1 response."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        position = 0
        while self._state is _State.HEAD:
            end = data.find(b"\r\n\r\n", position)
            if end < 0:
                if len(data) - position > MAX_HEAD_BYTES:
                    raise ProtocolError("response head is too large")
                self._rest = data[position:]
                return
            self._read_head(data[position:end])
            position = end + 4
        if self._state is _State.CHUNKED or self._state is _State.TRAILERS:
            self._read_chunks(data, position)
        elif self._state is _State.LENGTH:
            end = min(len(data), position + self._left)
            self._take(data, position, end)
            self._left -= end - position
            if not self._left:
                self._state = _State.DONE
        elif self._state is _State.UNTIL_CLOSE:
            self._take(data, position, len(data))

    def eof(self) -> bool:
        """The peer closed; returns whether that completes the response."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
        return self.done

    def _read_head(self, head: bytes) -> None:
        lines = head.lower().split(b"\r\n")
        parts = lines[0].split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"http/1.") or not parts[1].isdigit():
            raise ProtocolError("no HTTP/1.1 status line")
        self.status = int(parts[1])
        if 100 <= self.status < 200:
            return  # an interim answer; the real head follows
        length = -1
        chunked = False
        for line in lines[1:]:
            if line.startswith(b"content-length:"):
                length = int(line[15:])
            elif line.startswith(b"transfer-encoding:"):
                chunked = b"chunked" in line
            elif line.startswith(b"connection:"):
                self.reusable = b"close" not in line
        if chunked:
            self._state = _State.CHUNKED
        elif length == 0 or self.status in (204, 304):
            self._state = _State.DONE
        elif length > 0:
            self._state = _State.LENGTH
            self._left = length
        else:
            self._state = _State.UNTIL_CLOSE
            self.reusable = False

    def _read_chunks(self, data: bytes, position: int) -> None:
        size = len(data)
        while True:
            if self._left:
                end = min(size, position + self._left)
                self._take(data, position, end)
                self._left -= end - position
                position = end
                if self._left:
                    return
                self._skip = 2  # the line end behind the chunk
            if self._skip:
                step = min(self._skip, size - position)
                self._skip -= step
                position += step
                if self._skip:
                    return
            end = data.find(b"\r\n", position)
            if end < 0:
                if size - position > MAX_CHUNK_LINE_BYTES:
                    raise ProtocolError("chunk size line is too long")
                self._rest = data[position:]
                return
            line = data[position:end]
            position = end + 2
            if self._state is _State.TRAILERS:
                if not line:
                    self._state = _State.DONE
                    return
                continue
            try:
                self._left = int(line.split(b";", 1)[0], 16)
            except ValueError:
                raise ProtocolError("no chunk size") from None
            if not self._left:
                self._state = _State.TRAILERS

    def _take(self, data: bytes, start: int, end: int) -> None:
        if end == start:
            return
        self.body_bytes += end - start
        self.events += data.count(b"\n\n", start, end)
        if self.tail.endswith(b"\n") and data[start] == 10 and not self.tail.endswith(b"\n\n"):
            self.events += 1  # a blank line cut in two
        if end - start >= TAIL_BYTES:
            self.tail = data[end - TAIL_BYTES : end]
        else:
            self.tail = (self.tail + data[start:end])[-TAIL_BYTES:]
