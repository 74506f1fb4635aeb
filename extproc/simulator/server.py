"""The HTTP front of a simulated engine: listeners, faults, health, metrics and the facilities for tests.

Nothing here models time; see ``engine`` for that and ``pump`` for how it meets the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
from aiohttp import web

from extproc.simulator.api_error import ApiError
from extproc.simulator.engine import Engine
from extproc.simulator.faults import Faults
from extproc.simulator.kv_publisher import KvPublisher
from extproc.simulator.metrics_page import MetricsPage
from extproc.simulator.openai_api import OpenAiApi
from extproc.simulator.options import Options
from extproc.simulator.profile import Profile
from extproc.simulator.pump import Pump
from extproc.simulator.recorder import Recorder
from extproc.simulator.sse import reset

_MAX_BODY = 1 << 28
_VERSION = "0.32.0"
_POLLED = frozenset({"/metrics", "/health", "/v1/models", "/kv_event_sources"})
"""Paths that gateways ask all the time; they are not recorded."""
_GARBAGE = "<html>vllm:num_requests_running{ 0x0 \x00\ufffd\nvllm:kv_cache_usage_perc NaN NaN NaN\n# TYPE"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Handle:
    """A running simulated engine."""

    port: int
    control_port: int | None
    kv: KvPublisher | None
    engine: Engine
    recorder: Recorder
    _server: Server

    @property
    def faults(self) -> Faults:
        """The switches as they are."""
        return self._server.faults

    async def set_faults(self, faults: Faults) -> None:
        """Replace the switches."""
        await self._server.set_faults(faults)

    async def stop(self) -> None:
        """Close every connection and socket."""
        await self._server.stop()


async def serve(
    profile: Profile,
    model: str,
    host: str = "127.0.0.1",
    port: int = 0,
    options: Options | None = None,
) -> Handle:
    """Start a simulated engine in the running loop.

    Raises:
        OSError, zmq.ZMQError: a port is taken.
    """
    return await Server(profile, model, host, options or Options()).start(port)


class Server:
    """Everything one simulated engine listens with."""

    def __init__(self, profile: Profile, model: str, host: str, options: Options) -> None:
        self.faults = Faults()
        self._model = model
        self._host = host
        self._options = options
        self._rng = Random(options.seed)
        self._kv: KvPublisher | None = None
        if options.kv_events_port is not None:
            self._kv = KvPublisher(
                host,
                options.kv_events_port,
                options.kv_replay_port,
                block_size=profile.block_size,
                wire=options.kv_wire,
            )
        self._engine = Engine(profile, Random(options.seed + 1), kv_events=self._kv is not None)
        self._pump = Pump(
            self._engine, tick_s=options.tick_s, on_kv=None if self._kv is None else self._kv.publish
        )
        held = profile.kv_blocks * profile.block_size
        self._max_model_len = min(options.max_model_len or held, held)
        self._page = MetricsPage(model, profile)
        self._frozen_page: str | None = None
        self._recorder = Recorder(options.record, options.record_bytes)
        self._runners: list[web.AppRunner] = []
        self._site: web.TCPSite | None = None
        self._port = 0

    async def start(self, port: int) -> Handle:
        """Listen; the handle tells the ports."""
        try:
            main = await self._runner(self._main_routes())
            self._port = await self._listen(main, port)
            control_port = None
            if self._options.control_port is not None:
                control = await self._runner(self._control_routes())
                site = web.TCPSite(control, self._host, self._options.control_port)
                await site.start()
                control_port = _bound_port(control)
            await self.set_faults(self._options.faults)
        except BaseException:
            await self.stop()
            raise
        return Handle(self._port, control_port, self._kv, self._engine, self._recorder, self)

    async def stop(self) -> None:
        """Close everything; safe to call twice."""
        self._pump.close()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        self._site = None
        if self._kv is not None:
            await self._kv.close()
            self._kv = None

    async def set_faults(self, faults: Faults) -> None:
        """Replace the switches; ``refuse`` takes effect before this returns."""
        self.faults = faults
        self._engine.slowdown = faults.slow
        if not faults.freeze_metrics:
            self._frozen_page = None
        if faults.refuse and self._site is not None:
            await self._site.stop()
            self._site = None
            server = self._runners[0].server
            for connection in server.connections if server is not None else []:
                reset(connection.transport)
        elif not faults.refuse and self._site is None and self._runners:
            await self._listen(self._runners[0], self._port)

    # -- listeners

    async def _runner(self, routes: list[web.RouteDef]) -> web.AppRunner:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._middleware])
        app.add_routes(routes)
        runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=self._options.keepalive_s,
            handler_cancellation=True,  # a client that leaves cancels its handler, which frees its KV blocks
            auto_decompress=False,  # bodies are recorded as they came
            max_line_size=65_536,
            max_field_size=65_536,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        self._runners.append(runner)
        return runner

    async def _listen(self, runner: web.AppRunner, port: int) -> int:
        self._site = web.TCPSite(runner, self._host, port, reuse_address=True, backlog=1024)
        await self._site.start()
        return _bound_port(runner)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Recording, faults, and errors in vLLM's shape."""
        if request.path.startswith("/_sim/"):
            return await handler(request)
        if self._recorder.enabled and request.path not in _POLLED:
            headers = [
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers
            ]
            body = b"" if "upgrade" in request.headers else await request.read()
            self._recorder.add(request.method, request.path_qs, headers, body)
        if self.faults.hang:
            await asyncio.Event().wait()
        try:
            if self.faults.status is not None and request.method == "POST":
                await request.read()
                if self._rng.random() < self.faults.share:
                    raise ApiError(self.faults.status, "simulated failure", "InternalServerError")
            return await handler(request)
        except ConnectionError:
            # The client left while we wrote; nobody reads this answer, and it is no error of the server.
            return web.Response(status=499)
        except ApiError as error:
            return web.Response(status=error.status, body=error.body(), content_type="application/json")
        except web.HTTPException as error:
            detail = msgspec.json.encode({"detail": error.reason})
            return web.Response(status=error.status, body=detail, content_type="application/json")

    # -- routes

    def _main_routes(self) -> list[web.RouteDef]:
        api = OpenAiApi(
            self._pump, self._model, self._options, self._max_model_len, self._page, lambda: self.faults
        )
        return [
            *api.routes(),
            web.get("/health", self._health),
            web.get("/ping", self._health),
            web.get("/version", self._version),
            web.get("/v1/models", self._models),
            web.get("/metrics", self._metrics),
            web.get("/kv_event_sources", self._kv_event_sources),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
            *self._control_routes(),
        ]

    def _control_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/_sim/faults", self._get_faults),
            web.post("/_sim/faults", self._post_faults),
            web.delete("/_sim/faults", self._delete_faults),
            web.get("/_sim/requests", self._requests),
            web.delete("/_sim/requests", self._forget_requests),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": _VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        base = {"object": "model", "created": 0, "owned_by": "vllm"}
        served: list[dict[str, Any]] = [
            base
            | {
                "id": self._model,
                "root": self._model,
                "parent": None,
                "max_model_len": self._max_model_len,
            }
        ]
        served += [
            base | {"id": name, "root": name, "parent": self._model, "max_model_len": None}
            for name in self._options.adapters
        ]
        return _json({"object": "list", "data": served})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.faults.no_metrics:
            raise web.HTTPNotFound
        text = _GARBAGE if self.faults.garbage_metrics else self._frozen_page
        if text is None:
            metrics = self._engine.metrics(self._pump.now)
            text = self._page.render(metrics, self._pump.ttft, self._pump.e2e)
            if self.faults.freeze_metrics:
                self._frozen_page = text
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        """vLLM 0.32's own shape: a publisher by data-parallel rank."""
        if self._kv is None:
            return _json({})
        return _json(
            {
                "0": {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": self._kv.endpoint,
                    "replay_endpoint": self._kv.replay_endpoint,
                    "topic": self._kv.topic,
                }
            }
        )

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._pump.clear_cache() else 409)

    async def _get_faults(self, request: web.Request) -> web.Response:
        return _json(self.faults)

    async def _post_faults(self, request: web.Request) -> web.Response:
        try:
            faults = self.faults.changed(await request.read())
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return web.Response(status=400, text=str(error))
        return await self._answer_and_set(faults)

    async def _delete_faults(self, request: web.Request) -> web.Response:
        return await self._answer_and_set(Faults())

    async def _answer_and_set(self, faults: Faults) -> web.Response:
        await self.set_faults(faults)
        return _json(faults)

    async def _requests(self, request: web.Request) -> web.Response:
        limit = request.query.get("limit", "100")
        if not limit.isdigit():
            return web.Response(status=400, text="limit must be a number")
        return _json(self._recorder.last(int(limit)))

    async def _forget_requests(self, request: web.Request) -> web.Response:
        self._recorder.clear()
        return web.Response(status=204)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _bound_port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])
