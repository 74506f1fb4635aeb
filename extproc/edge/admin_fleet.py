"""Admin pages that change the fleet: thin wrappers of :class:`~extproc.edge.registrations.Registrations`.

=============================  ================================================================
POST /fleet/drain              ``{"endpoint": NAME, "wait_s": 0}``: no new requests
POST /fleet/undrain            ``{"endpoint": NAME}``: requests again
POST /fleet/register           ``{"address": "HOST:PORT", "pool": NAME, …}``: a new endpoint
POST /fleet/remove             ``{"endpoint": NAME}``: forget a registered one
=============================  ================================================================

Who may do so is not asked here: the admin application's guard has asked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from extproc.edge.registrations import Refused, Registrations

_LONGEST_WAIT_S = 3600.0


def add_fleet_pages(app: web.Application, registrations: Registrations) -> None:
    """Add the pages to the admin application."""
    pages = _Pages(registrations)
    app.router.add_post("/fleet/drain", pages.drain)
    app.router.add_post("/fleet/undrain", pages.undrain)
    app.router.add_post("/fleet/register", pages.register)
    app.router.add_post("/fleet/remove", pages.remove)


class _Pages:
    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations

    async def drain(self, request: web.Request) -> web.StreamResponse:
        asked = await _body(request, {"endpoint", "wait_s"})
        wait_s = asked.get("wait_s", 0)
        if (
            isinstance(wait_s, bool)
            or not isinstance(wait_s, int | float)
            or not 0 <= wait_s <= _LONGEST_WAIT_S
        ):
            raise web.HTTPBadRequest(text=f"`wait_s` must be seconds from 0 to {_LONGEST_WAIT_S:.0f}")
        return await _answer(self._registrations.drain(_name(asked), float(wait_s)))

    async def undrain(self, request: web.Request) -> web.StreamResponse:
        return await _answer(self._registrations.undrain(_name(await _body(request, {"endpoint"}))))

    async def register(self, request: web.Request) -> web.StreamResponse:
        return await _answer(self._registrations.register(await _body(request, None)))

    async def remove(self, request: web.Request) -> web.StreamResponse:
        return await _answer(self._registrations.remove(_name(await _body(request, {"endpoint"}))))


async def _body(request: web.Request, keys: set[str] | None) -> dict[str, Any]:
    try:
        asked = msgspec.json.decode(await request.read(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise web.HTTPBadRequest(text=f"the body must be a JSON object: {error}") from error
    unknown = sorted(asked.keys() - keys) if keys is not None else []
    if unknown:
        raise web.HTTPBadRequest(
            text=f"unknown key `{unknown[0][:60]}`; there are {', '.join(sorted(keys or ()))}"
        )
    return asked


def _name(asked: Mapping[str, Any]) -> str:
    name = asked.get("endpoint")
    if not isinstance(name, str) or not name:
        raise web.HTTPBadRequest(text="`endpoint` must name one: a cluster, HOST:PORT, or CLUSTER/HOST:PORT")
    return name


async def _answer(doing: Any) -> web.StreamResponse:
    try:
        done = await doing
    except Refused as refused:
        body = {"error": {"status": refused.status, "message": str(refused)}}
        return web.Response(
            body=msgspec.json.encode(body), status=refused.status, content_type="application/json"
        )
    return web.Response(body=msgspec.json.encode(done), content_type="application/json")
