"""Writing a stream of server-sent events, and cutting a connection on purpose."""

from __future__ import annotations

import socket
import struct

from aiohttp import web

from extproc.simulator.faults import Faults


class Cut(Exception):
    """The connection was reset by the ``cut`` fault; nothing more can be sent."""


class SseWriter:
    """Writes events, all that are due in one HTTP chunk unless ``separate``; ends at the ``cut`` fault."""

    def __init__(self, request: web.Request, response: web.StreamResponse, faults: Faults, separate: bool):
        self._request = request
        self._response = response
        self._left = faults.cut
        self._separate = separate

    async def send(self, events: list[bytes]) -> None:
        """Write ``events``.

        Raises:
            Cut: the fault's count of events is reached and the connection reset.
            ConnectionError: the client has gone.
        """
        cut = self._left is not None and len(events) > self._left
        if self._left is not None:
            events = events[: self._left]
            self._left -= len(events)
        if self._separate:
            for event in events:
                await self._response.write(event)
        elif events:
            await self._response.write(b"".join(events))
        if cut:
            reset(self._request.transport)
            raise Cut


def reset(transport: object) -> None:
    """Close a connection with a TCP reset; what was written before it has been handed to the kernel."""
    if transport is None:
        return
    sock = transport.get_extra_info("socket")  # type: ignore[attr-defined]
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()  # type: ignore[attr-defined]
