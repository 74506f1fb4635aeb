"""Publishes KV-cache events as vLLM does: a PUB socket, and a ROUTER that replays the last batches.

A published message is [topic, sequence, batch], the sequence 8 bytes big-endian from 0. A replay request is
one sequence; the answer is [topic, sequence, batch] for every batch kept from there on, then sequence -1 with an
empty batch. The first generation of the wire (``arrays``) leaves the topic out of replays.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import zmq
from zmq.asyncio import Context as AsyncContext

from extproc.simulator.kv_wire import KvWire, encode_batch
from extproc.simulator.pump import StoredTokens

_RING = 10_000
_HIGH_WATER_MARK = 100_000
_END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """Owns both sockets. Port 0 takes a free one; raises zmq.ZMQError when a port is taken."""

    def __init__(
        self, host: str, port: int, replay_port: int, *, block_size: int, wire: KvWire, topic: str = ""
    ) -> None:
        self._block_size = block_size
        self._wire = wire
        self._topic = topic.encode()
        self._sequence = 0
        self._ring: deque[tuple[bytes, bytes]] = deque(maxlen=_RING)
        self._context = zmq.Context()
        # The PUB socket never blocks (slow subscribers lose messages), so it needs no awaiting.
        self._pub = self._context.socket(zmq.PUB)
        self._router = AsyncContext(self._context).socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(_HIGH_WATER_MARK)
            self._pub.bind(f"tcp://{host}:{port or '*'}")
            self._router.bind(f"tcp://{host}:{replay_port or '*'}")
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self.port = _port(self._pub)
        self.replay_port = _port(self._router)
        self.endpoint = f"tcp://{host}:{self.port}"
        self.replay_endpoint = f"tcp://{host}:{self.replay_port}"
        self._task = asyncio.get_running_loop().create_task(self._replay())

    @property
    def topic(self) -> str:
        """First frame of every message."""
        return self._topic.decode()

    def publish(self, events: list[StoredTokens]) -> None:
        """Send one batch and keep it for replays."""
        payload = encode_batch(events, self._block_size, time.time(), self._wire)
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._ring.append((sequence, payload))
        self._pub.send_multipart((self._topic, sequence, payload))

    async def close(self) -> None:
        """Close both sockets."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()

    async def _replay(self) -> None:
        """Answer replay requests one after another; malformed ones are ignored."""
        old = self._wire is KvWire.ARRAYS
        topic, empty = ((), ()) if old else ((self._topic,), (b"",))
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, start = frames[0], frames[2]
            # Sequences of equal length compare as bytes like the numbers they are.
            for sequence, payload in [kept for kept in self._ring if kept[0] >= start]:
                await self._router.send_multipart((client, b"", *topic, sequence, payload))
            await self._router.send_multipart((client, b"", *empty, _END, b""))


def _port(socket: Any) -> int:
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])
