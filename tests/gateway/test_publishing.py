"""Publishing to a real Envoy: what "used", "refused" and "late" mean there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.edge.envoy_admin import AdminUnreachable, EnvoyAdmin
from extproc.edge.publisher import Publication, Publisher
from tests.gateway.echo_engine import running_engine
from tests.gateway.envoy_process import Envoy, running_envoy
from tests.gateway.stub_processor import running_stub
from tests.gateway.test_envoy_variants import cluster

Parts = tuple[Envoy, Publisher, EnvoyAdmin]


@pytest.fixture
async def parts(tmp_path: Path, live_dir: Path, extproc_address: str) -> AsyncIterator[Parts]:
    await Publisher(live_dir, blind_wait_s=0).publish([cluster("first", "127.0.0.1:1")])
    async with running_envoy(tmp_path, extproc_address=extproc_address, live_dir=live_dir) as envoy:
        admin = EnvoyAdmin(envoy.admin_url)
        yield envoy, Publisher(live_dir, admin, wait_s=3.0), admin
        await admin.close()


async def test_published_clusters_are_in_use(parts: Parts) -> None:
    _, publisher, admin = parts
    assert (
        await publisher.publish([cluster("a", "127.0.0.1:1"), cluster("b", "127.0.0.1:2")])
        is Publication.USED
    )
    assert await admin.clusters() == {"a", "b"}
    await publisher.publish([cluster("b", "127.0.0.1:2")])
    assert await admin.clusters() == {"a", "b"}
    await publisher.finish_removal([cluster("b", "127.0.0.1:2")], idle_now, 1)
    assert (await publisher.publish([cluster("b", "127.0.0.1:3")])) is Publication.USED
    assert await admin.clusters() == {"b"}


async def test_what_envoy_refuses_is_taken_back(parts: Parts) -> None:
    _, publisher, admin = parts
    assert await publisher.publish([cluster("a", "127.0.0.1:1")]) is Publication.USED
    # A bad cluster beside a good one: Envoy takes the good one and refuses the file.
    bad = [cluster("a", "127.0.0.1:1"), cluster("good", "127.0.0.1:2"), cluster("bad", "not-an-ip:1")]
    assert await publisher.publish(bad) is Publication.REFUSED
    assert (
        await publisher.publish([cluster("a", "127.0.0.1:1"), cluster("c", "127.0.0.1:3")])
        is Publication.USED
    )
    assert await admin.clusters() == {"a", "c"}


async def test_a_name_that_does_not_resolve_does_not_hold_the_others_up(parts: Parts) -> None:
    _, publisher, _ = parts
    lost: dict[str, Any] = {**cluster("lost", "no-such-engine.invalid:1"), "type": "STRICT_DNS"}
    outcome = await publisher.publish([cluster("a", "127.0.0.1:1"), lost])
    assert outcome in (Publication.USED, Publication.LATE)


async def test_an_admin_that_is_not_there(tmp_path: Path) -> None:
    admin = EnvoyAdmin(f"unix:{tmp_path}/nothing.sock")
    with pytest.raises(AdminUnreachable):
        await admin.cds()
    await admin.close()


async def test_no_request_fails_while_clusters_change(
    tmp_path: Path, live_dir: Path, extproc_address: str
) -> None:
    async with running_engine("a") as a, running_engine("b") as b, running_stub(extproc_address) as stub:
        both = [cluster("pool", a.address, b.address, list_hosts=True)]
        await Publisher(live_dir, blind_wait_s=0).publish(both)
        async with (
            running_envoy(tmp_path, extproc_address=extproc_address, live_dir=live_dir) as envoy,
            aiohttp.ClientSession() as session,
        ):
            await envoy.healthy_processor()
            admin = EnvoyAdmin(envoy.admin_url)
            publisher = Publisher(live_dir, admin)
            stub.groups, stub.hosts = ("pool",), b.address
            statuses: list[int] = []
            editing = True

            async def ask() -> None:
                while editing:
                    async with session.post(envoy.url + "/v1/x", data=b"{}") as reply:
                        statuses.append(reply.status)

            clients = [asyncio.create_task(ask()) for _ in range(4)]
            for number in range(10):
                engine = (a, b)[number % 2]
                wanted = [cluster("pool", engine.address, list_hosts=True), cluster(f"n{number}", a.address)]
                assert await publisher.publish(wanted) is Publication.USED
                stub.hosts = engine.address
                assert await publisher.finish_removal(wanted, idle_now, 1)
            editing = False
            await asyncio.gather(*clients)
            await admin.close()
    assert len(statuses) > 10
    assert set(statuses) == {200}


async def idle_now() -> None:
    """No lease is in the way."""
