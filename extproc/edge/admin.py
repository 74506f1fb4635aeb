"""Admin HTTP: metrics, health, the fleet, decisions, the configuration in use.

Rules of this file:

- reading is free, changing is not: any method but GET and HEAD needs the bearer token. Without a configured
  token, changes are allowed on a loopback address only, and not to web pages (a browser sends ``Origin``);
- every answer but /metrics is JSON, errors too: ``{"error": {"status", "message"}}``;
- what takes long (pages, large lists) is made in a thread.

=============================  ================================================================
GET /metrics                   Prometheus' text format
GET /livez                     200 while the process serves
GET /readyz                    200 when requests can be decided, else 503 with the reason
GET /fleet                     endpoints with state, leases, backlog, rates
GET /queue                     requests that wait, by pool, priority and tenant
GET /decisions?count=N         newest decision records, newest first
GET /decisions/ID              one record, by x-gateway-request-id
GET /config                    the configuration in use, secrets masked
GET /openapi.json              description of all of this
POST /reload                   read the configuration files now
POST /fleet/…                  drain, undrain, register, remove: see ``admin_fleet``
=============================  ================================================================
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from extproc import __version__
from extproc.edge.admin_fleet import add_fleet_pages
from extproc.edge.openapi import describe
from extproc.edge.registrations import Registrations
from extproc.fleet.endpoint import Endpoint
from extproc.telemetry.decision import render
from extproc.telemetry.fleet_report import fleet_report
from extproc.telemetry.metrics import CONTENT_TYPE, Metrics
from extproc.telemetry.ring import DecisionRing

_LOG = logging.getLogger(__name__)
_MOST_DECISIONS = 1000
_SECRET_WORDS = ("key", "token", "secret", "password", "authorization", "credential")
MASK = "***"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class AdminParts:
    """What the admin pages show and do."""

    metrics: Metrics
    endpoints: Mapping[str, Endpoint]
    """The fleet's own table."""
    ring: DecisionRing
    ready: Callable[[], tuple[bool, str]]
    """Whether requests can be decided, and why not."""
    config: Callable[[], Mapping[str, object]]
    """The configuration in use as plain values."""
    reload: Callable[[], Awaitable[Sequence[str]]]
    """Read the configuration files now; returns what is wrong with them, nothing when they were applied."""
    token: str | None = None
    loopback: bool = True
    """The admin address cannot be reached from other machines."""
    clock: Callable[[], float] = time.monotonic
    queue: Callable[[], Mapping[str, object]] = dict
    """Who waits where."""
    registrations: Registrations | None = None
    """Operations on the fleet; None: they are not offered."""


def build_admin(parts: AdminParts) -> web.Application:
    """The application; whoever runs it owns the socket."""
    pages = _Pages(parts)
    app = web.Application(middlewares=[_errors, pages.guard])
    app.router.add_get("/metrics", pages.metrics)
    app.router.add_get("/livez", pages.live)
    app.router.add_get("/readyz", pages.ready)
    app.router.add_get("/fleet", pages.fleet)
    app.router.add_get("/queue", pages.queue)
    app.router.add_get("/decisions", pages.decisions)
    app.router.add_get("/decisions/{id}", pages.decision)
    app.router.add_get("/config", pages.config)
    app.router.add_post("/reload", pages.reload)
    if parts.registrations is not None:
        add_fleet_pages(app, parts.registrations)
    app.router.add_get("/openapi.json", pages.openapi)
    return app


class _Pages:
    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            self._authorize(request)
        return await handler(request)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self._parts.metrics.sweep()
        page = await asyncio.to_thread(self._parts.metrics.page)
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE})

    async def live(self, request: web.Request) -> web.StreamResponse:
        return _json({"live": True})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        ready, reason = self._parts.ready()
        return _json({"ready": ready, "reason": reason}, status=200 if ready else 503)

    async def fleet(self, request: web.Request) -> web.StreamResponse:
        endpoints, now = list(self._parts.endpoints.values()), self._parts.clock()
        body = await asyncio.to_thread(
            lambda: msgspec.json.encode({"endpoints": fleet_report(endpoints, now)})
        )
        return _raw(body)

    async def queue(self, request: web.Request) -> web.StreamResponse:
        return _json(self._parts.queue())

    async def decisions(self, request: web.Request) -> web.StreamResponse:
        asked = request.query.get("count", "20")
        if not (asked.isascii() and asked.isdigit()):
            raise web.HTTPBadRequest(text=f"count must be a number from 1 to {_MOST_DECISIONS}")
        records = self._parts.ring.newest(min(int(asked[:9]), _MOST_DECISIONS))
        encode = msgspec.json.encode
        return _raw(
            await asyncio.to_thread(lambda: encode({"decisions": [render(record) for record in records]}))
        )

    async def decision(self, request: web.Request) -> web.StreamResponse:
        record = self._parts.ring.find(request.match_info["id"])
        if record is None:
            kept = self._parts.ring.capacity
            raise web.HTTPNotFound(
                text=f"no decision with this id among the newest {kept} and the running ones"
            )
        return _json(render(record))

    async def config(self, request: web.Request) -> web.StreamResponse:
        return _json(masked(self._parts.config()))

    async def reload(self, request: web.Request) -> web.StreamResponse:
        problems = list(await self._parts.reload())
        return _json({"applied": not problems, "problems": problems}, status=422 if problems else 200)

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return _json(describe(request.app, __version__))

    def _authorize(self, request: web.Request) -> None:
        token = self._parts.token
        if token is None:
            if self._parts.loopback and "origin" not in request.headers:
                return
            raise web.HTTPForbidden(text="changes need an admin token, and none is configured")
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(
                text="the bearer token is missing or wrong", headers={"www-authenticate": "Bearer"}
            )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        message = error.text or error.reason
        if error.status == 404 and request.match_info.http_exception is not None:
            message = f"there is no {request.path} here"
        headers = {
            name: value
            for name, value in error.headers.items()
            if name.lower() in ("allow", "www-authenticate")
        }
        return _json(
            {"error": {"status": error.status, "message": message}}, status=error.status, headers=headers
        )
    except asyncio.CancelledError:
        raise
    except Exception:
        _LOG.exception("admin request failed", extra={"path": request.path})
        return _json(
            {"error": {"status": 500, "message": "the request failed, see extproc's log"}}, status=500
        )


def masked(value: object, name: str = "") -> object:
    """``value`` with the text under every secret-sounding name replaced. Paths (``…_file``) are no
    secrets.
    """
    if isinstance(value, Mapping):
        return {str(key): masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    lower = name.lower()
    if (
        isinstance(value, str)
        and not lower.endswith("_file")
        and any(word in lower for word in _SECRET_WORDS)
    ):
        return MASK
    return value


def _json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return _raw(msgspec.json.encode(value, enc_hook=str), status, headers)


def _raw(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
