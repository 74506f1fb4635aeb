"""Admin pages of releases and shadow traffic. Orders are POST, so the admin's token rule holds for them.

======================================  ===========================================================
GET /releases                           every release: state, share, what was seen of both versions
POST /releases/POOL/pause               keep the share
POST /releases/POOL/promote             next step now; goes on after a pause, anew after a rollback
POST /releases/POOL/rollback            nobody gets the candidate; body ``{"reason": "…"}`` if wanted
POST /releases/POOL/score               ``{"version": "v2", "score": 0.8}``: quality of one answer
GET /shadow                             copies beside their originals
======================================  ===========================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import msgspec
from aiohttp import web

from extproc.release.releases import Releases
from extproc.release.rollout import Refused
from extproc.release.shadow import Shadows

_ORDERS = ("pause", "promote", "rollback")
_LONGEST_REASON = 500


def add_release_routes(app: web.Application, releases: Releases, shadows: Shadows) -> None:
    """Add the pages to the admin application."""
    pages = _Pages(releases, shadows)
    app.router.add_get("/releases", pages.list)
    app.router.add_get("/shadow", pages.shadow)
    app.router.add_post("/releases/{pool}/score", pages.score)
    app.router.add_post(f"/releases/{{pool}}/{{order:{'|'.join(_ORDERS)}}}", pages.order)


class _Pages:
    def __init__(self, releases: Releases, shadows: Shadows) -> None:
        self._releases = releases
        self._shadows = shadows

    async def list(self, request: web.Request) -> web.StreamResponse:
        """Every release: state, share, what was seen of both versions."""
        return _json({"releases": self._releases.report()})

    async def shadow(self, request: web.Request) -> web.StreamResponse:
        """Copies of shadow traffic beside their originals."""
        return _json({"shadow": self._shadows.report()})

    async def order(self, request: web.Request) -> web.StreamResponse:
        """Pause, promote or roll back the release of a pool."""
        said = await _body(request)
        reason = said.get("reason", "")
        if not isinstance(reason, str) or len(reason) > _LONGEST_REASON:
            raise web.HTTPBadRequest(text=f"`reason` must be text of at most {_LONGEST_REASON} characters")
        try:
            event = self._releases.order(request.match_info["pool"], request.match_info["order"], reason)
        except Refused as error:
            raise web.HTTPConflict(text=str(error)) from error
        return _json(asdict(event))

    async def score(self, request: web.Request) -> web.StreamResponse:
        """Take the quality score of one answer of a version."""
        said = await _body(request)
        version, score = said.get("version"), said.get("score")
        if not isinstance(version, str) or isinstance(score, bool) or not isinstance(score, int | float):
            raise web.HTTPBadRequest(text='write `{"version": "v2", "score": 0.8}`')
        if not math.isfinite(score):
            raise web.HTTPBadRequest(text="`score` must be a finite number")
        try:
            self._releases.score(request.match_info["pool"], version, float(score))
        except Refused as error:
            raise web.HTTPConflict(text=str(error)) from error
        return _json({"taken": True})


async def _body(request: web.Request) -> Mapping[str, object]:
    raw = await request.read()
    if not raw:
        return {}
    try:
        said = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"the body is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return said


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
