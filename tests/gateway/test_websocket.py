"""WebSocket connections through the whole gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.gateway_process import Lab, renew_every, running_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path_factory.mktemp("ws"), ("a", "b"), change=renew_every(0.3)) as running:
        yield running


async def test_text_and_bytes_are_echoed(lab: Lab) -> None:
    async with lab.session.ws_connect(lab.url + "/v1/realtime?model=m") as socket:
        for number in range(50):
            await socket.send_str(f"hello {number}")
            assert await socket.receive_str(timeout=5) == f"hello {number}"
        await socket.send_bytes(b"\x00\xff" * 50_000)
        assert await socket.receive_bytes(timeout=5) == b"\x00\xff" * 50_000
    await lab.extproc.idle()


async def test_an_open_connection_counts_as_a_lease_of_its_engine(lab: Lab) -> None:
    sockets = [await lab.session.ws_connect(lab.url + "/v1/realtime") for _ in range(4)]
    leases = {name: row["leases"] for name, row in (await lab.extproc.fleet()).items()}
    assert leases == {"a": 2, "b": 2}
    for socket in sockets:
        await socket.close()
    await lab.extproc.idle()


async def test_a_connection_whose_client_vanishes_is_closed(lab: Lab) -> None:
    socket = await lab.session.ws_connect(lab.url + "/v1/realtime")
    assert (await lab.extproc.metrics())["extproc_leases"] == 1
    transport = socket._response.connection.transport  # type: ignore[union-attr]
    assert transport is not None
    transport.abort()
    await lab.extproc.idle()
