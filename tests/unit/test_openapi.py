"""The admin API's description is made from what is served."""

from __future__ import annotations

from aiohttp import web

from extproc.edge.openapi import describe


async def known(request: web.Request) -> web.StreamResponse:
    raise NotImplementedError


async def other(request: web.Request) -> web.StreamResponse:
    """Answers something of its own.

    More is not shown.
    """
    raise NotImplementedError


def test_every_route_is_described_from_the_table_or_its_docstring() -> None:
    app = web.Application()
    app.router.add_get("/decisions/{id}", known)
    app.router.add_post("/fleet/drain", known)
    app.router.add_post("/other/{name}/{id:[0-9]+}", other)
    document = describe(app, "1.2.3")
    paths = document["paths"]
    assert document["info"]["version"] == "1.2.3"
    assert set(paths) == {"/decisions/{id}", "/fleet/drain", "/other/{name}/{id}"}
    assert paths["/other/{name}/{id}"]["post"]["summary"] == "Answers something of its own."
    assert [one["name"] for one in paths["/other/{name}/{id}"]["post"]["parameters"]] == ["name", "id"]
    drain = paths["/fleet/drain"]["post"]
    assert drain["requestBody"]["content"]["application/json"]["schema"]["required"] == ["endpoint"]
    assert drain["security"] == [{"token": []}, {}]
    assert "security" not in paths["/decisions/{id}"]["get"]
