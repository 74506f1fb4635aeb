"""Subscribes to the KV-cache events of every endpoint that declares a ``kv_events_port``.

Rules of this file:

- a SUB socket a data-parallel rank. The engine's own ``GET /kv_event_sources`` tells how many ranks there are
  and where they replay; without it there is rank 0, at the declared ports. Ports are meant on the endpoint's
  host: rank ``r`` is at the declared port plus as much as the engine says it is from rank 0;
- every connection after the first is told to the rank: an engine may have restarted, and messages are lost;
- a replay has a DEALER socket of its own, closed when it ends or nothing came for ``replay_timeout_s``;
- sockets are read when readable, on the event loop, in turns of a fraction of a millisecond: events wait,
  requests do not. What we cannot keep up with stays in ZeroMQ's queue, and is lost there if it grows too long:
  that makes a gap, and gaps are replayed;
- all judgement is in :mod:`extproc.kvcache.rank`; this file only carries bytes.

A message is ``[topic, number, batch]``; a replay is asked for by ``["", first number]`` and answered by one
``["", (topic,) number, batch]`` a message, then number -1 (vLLM; older ones leave out the topic). Numbers are 8
bytes, big-endian.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import zmq

from extproc.edge.scraper import Access
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.kvcache.rank import Rank
from extproc.kvcache.ranks import Ranks

log = logging.getLogger(__name__)

_TURN_S = 0.0001
_TICK_S = 0.5
_ASK_AGAIN_S = 60.0
"""Between two questions for the sources of an engine that answered the last."""
_RETRY_S = 5.0
_HIGH_WATER_MARK = 100_000
_END = b"\xff" * 8
_Frames = list[bytes]


@dataclass(slots=True, frozen=True)
class Place:
    """Where one rank publishes and replays."""

    events: str
    replay: str | None = None


@dataclass(slots=True)
class _Source:
    """One rank's sockets."""

    key: str
    slot: int
    number: int
    place: Place
    rank: Rank
    events: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    connected: bool = False
    replay: zmq.Socket[bytes] | None = None
    replay_heard_at: float = 0.0


class KvEvents:
    """``await run()`` until cancelled. ``endpoints`` is the fleet's own table; endpoints come and go."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        ranks: Ranks,
        *,
        access: Callable[[EndpointSpec], Access] = lambda spec: Access(),
        replay_timeout_s: float = 5.0,
        turn_s: float = _TURN_S,
        on_told: Callable[[int, float], None] = lambda slot, now: None,
    ) -> None:
        """``on_told`` hears of every message taken: the endpoint's slot, and now."""
        self.replay_timeout_s = replay_timeout_s
        self._endpoints = endpoints
        self._ranks = ranks
        self._access = access
        self._turn_s = turn_s
        self._on_told = on_told
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        self._sources: dict[tuple[str, int], _Source] = {}
        self._told: dict[str, tuple[object, dict[int, Place]]] = {}
        """Endpoint key -> the spec it was asked under, and what it told."""
        self._ask_at: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._ready: deque[tuple[_Source, Any]] = deque()
        """Sockets that may have something."""
        self._busy: deque[_Source] = deque()
        """Ranks with messages not yet taken."""
        self._scheduled = False
        self._behind_since: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def behind_s(self) -> float:
        """How long there has been unread work without a pause."""
        return 0.0 if self._behind_since is None else time.monotonic() - self._behind_since

    async def run(self) -> None:
        """Subscribe until cancelled; leaves no socket and no task behind."""
        self._loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session:
            try:
                while True:
                    self._reconcile(session, time.monotonic())
                    await asyncio.sleep(_TICK_S)
            finally:
                for task in self._asking.values():
                    task.cancel()
                await asyncio.gather(*self._asking.values(), return_exceptions=True)
                for source in list(self._sources.values()):
                    self._close(source)
                self._context.destroy(linger=0)

    def _reconcile(self, session: aiohttp.ClientSession, now: float) -> None:
        wanted: dict[tuple[str, int], tuple[Endpoint, Place]] = {}
        for key, endpoint in self._endpoints.items():
            spec = endpoint.spec
            if spec.kv_events_port is None:
                continue
            told = self._told.get(key)
            if told is not None and told[0] is not spec:
                told = None
            if self._ask_at.get(key, 0.0) <= now and key not in self._asking:
                self._ask_at[key] = now + _RETRY_S
                self._asking[key] = asyncio.create_task(self._ask_sources(session, endpoint))
            for number, place in (told[1] if told is not None else _declared(endpoint)).items():
                wanted[key, number] = (endpoint, place)
        for known in [one for one in self._told if one not in self._endpoints]:
            self._told.pop(known)
            self._ask_at.pop(known, None)
        for name, source in list(self._sources.items()):
            found = wanted.get(name)
            if found is None or found[0].slot != source.slot or found[1] != source.place:
                self._close(source)
        for name, (endpoint, place) in wanted.items():
            if name not in self._sources:
                self._open(name, endpoint, place)
        for source in list(self._sources.values()):
            if source.replay is not None and now - source.replay_heard_at > self.replay_timeout_s:
                log.warning("no replay of KV events", extra={"endpoint": source.key, "rank": source.number})
                self._end_replay(source)
                source.rank.replay_failed()
                self._look(source)
            elif source.rank.wants is not None:
                self._look(source)

    def _open(self, name: tuple[str, int], endpoint: Endpoint, place: Place) -> None:
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        rank = self._ranks.add(endpoint.slot, name[1], can_replay=place.replay is not None)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        source = _Source(name[0], endpoint.slot, name[1], place, rank, socket, monitor)
        self._sources[name] = source
        try:
            socket.connect(place.events)
        except zmq.ZMQError as error:
            log.error(
                "no KV events", extra={"endpoint": name[0], "address": place.events, "error": str(error)}
            )
        self._watch(source, socket)
        self._watch(source, monitor)
        rank.begin()
        self._look(source)

    def _close(self, source: _Source) -> None:
        self._end_replay(source)
        self._unwatch(source.events)
        self._unwatch(source.monitor)
        source.events.disable_monitor()
        source.monitor.close(linger=0)
        source.events.close(linger=0)
        del self._sources[source.key, source.number]
        if self._ranks.of(source.slot).get(source.number) is source.rank:
            self._ranks.remove(source.slot, source.number)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK if kind == zmq.SUB else 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return socket

    def _watch(self, source: _Source, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        self._loop.add_reader(socket.fileno(), self._readable, source, socket)
        self._readable(source, socket)

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        assert self._loop is not None
        self._loop.remove_reader(socket.fileno())
        for entry in [entry for entry in self._ready if entry[1] is socket]:
            self._ready.remove(entry)

    def _readable(self, source: _Source, socket: zmq.Socket[bytes]) -> None:
        # ZeroMQ's descriptor tells of changes, not of states: read until there is nothing.
        self._ready.append((source, socket))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Work for a fraction of a millisecond, then let others."""
        self._scheduled = False
        began = time.monotonic()
        if self._behind_since is None:
            self._behind_since = began
        until = began + self._turn_s
        while time.monotonic() < until:
            if self._busy:
                source = self._busy.popleft()
                taken = source.rank.taken
                more = source.rank.step()
                if source.rank.taken != taken:
                    self._on_told(source.slot, time.monotonic())
                if more:
                    self._busy.append(source)
                elif source.rank.wants is not None:
                    self._look(source)
            elif self._ready:
                source, socket = self._ready[0]
                if not self._receive(source, socket) and self._ready and self._ready[0][1] is socket:
                    self._ready.popleft()
            else:
                self._behind_since = None
                return
        self._schedule()

    def _receive(self, source: _Source, socket: zmq.Socket[bytes]) -> bool:
        """Read one message; False when there is none."""
        if socket.closed:
            return False
        try:
            frames: _Frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            log.exception("KV events cannot be read", extra={"endpoint": source.key})
            return False
        if socket is source.events:
            if len(frames) == 3 and len(frames[1]) == 8:
                source.rank.message(int.from_bytes(frames[1], "big"), frames[2])
            else:
                source.rank.counts.unreadable += 1
        elif socket is source.monitor:
            if source.connected:
                source.rank.reconnected()
            source.connected = True
        elif socket is source.replay:
            source.replay_heard_at = time.monotonic()
            number, payload = frames[-2:] if len(frames) >= 2 else (b"", b"")
            if number == _END:
                self._end_replay(source)
                source.rank.replay_ended()
            elif len(number) == 8:
                source.rank.replayed(int.from_bytes(number, "big"), payload)
        self._look(source)
        return True

    def _look(self, source: _Source) -> None:
        """After anything that happened to a rank: is there work, does it want a replay?"""
        rank = source.rank
        if rank.wants is not None and source.place.replay is not None:
            self._begin_replay(source, rank.wants)
            rank.wants = None
        if rank.behind and source not in self._busy:
            self._busy.append(source)
            self._schedule()

    def _begin_replay(self, source: _Source, first: int) -> None:
        assert source.place.replay is not None
        self._end_replay(source)
        socket = source.replay = self._socket(zmq.DEALER)
        source.replay_heard_at = time.monotonic()
        with contextlib.suppress(zmq.ZMQError):
            socket.connect(source.place.replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")), zmq.NOBLOCK)
        self._watch(source, socket)

    def _end_replay(self, source: _Source) -> None:
        socket, source.replay = source.replay, None
        if socket is not None:
            self._unwatch(socket)
            socket.close(linger=0)

    async def _ask_sources(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        """Ask the engine for its ranks; what it says is taken at the next tick."""
        spec = endpoint.spec
        try:
            url = f"{'https' if spec.tls else 'http'}://{spec.address}/kv_event_sources"
            access = self._access(spec)
            async with session.get(
                url,
                headers=access.headers,
                ssl=access.ssl,
                server_hostname=access.server_hostname if spec.tls else None,
                allow_redirects=False,
            ) as reply:
                body = await reply.content.read(1 << 20)
                if reply.status == 200 and (places := places_told(endpoint, body)):
                    self._told[spec.key] = (spec, places)
                if reply.status < 500:
                    self._ask_at[spec.key] = time.monotonic() + _ASK_AGAIN_S
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        finally:
            self._asking.pop(spec.key, None)


class _Told(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    data_parallel_rank: int = 0


def _declared(endpoint: Endpoint) -> dict[int, Place]:
    spec = endpoint.spec
    replay = None if spec.kv_replay_port is None else _url(endpoint, spec.kv_replay_port)
    return {0: Place(_url(endpoint, spec.kv_events_port or 0), replay)}


def places_told(endpoint: Endpoint, body: bytes) -> dict[int, Place]:
    """What ``/kv_event_sources`` says: a map of rank to publisher, or a list of publishers; empty when it makes
    no sense."""
    spec = endpoint.spec
    try:
        told = msgspec.json.decode(body, type=dict[int, _Told] | list[_Told])
    except msgspec.DecodeError:
        return {}
    if isinstance(told, list):
        told = {one.data_parallel_rank: one for one in told}
    ports = {rank: port for rank, one in told.items() if (port := _port(one.endpoint)) is not None}
    if not ports:
        return {}
    first = ports[min(ports)] - min(ports)
    places = {}
    for rank, port in ports.items():
        replay = _port(told[rank].replay_endpoint)
        if spec.kv_replay_port is not None:
            replay = spec.kv_replay_port + port - first
        places[rank] = Place(
            _url(endpoint, (spec.kv_events_port or first) + port - first),
            None if replay is None else _url(endpoint, replay),
        )
    return places


def _port(address: str | None) -> int | None:
    port = (address or "").rpartition(":")[2]
    return int(port) if port.isdigit() and 0 < int(port) < 65_536 else None


def _url(endpoint: Endpoint, port: int) -> str:
    return f"tcp://{endpoint.spec.address.rpartition(':')[0]}:{port}"
