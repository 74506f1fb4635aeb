"""The Envoy configurations we ship, in a real Envoy, with a stub in extproc's place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.config.cluster_defaults import complete
from extproc.edge.publisher import render, write
from tests.gateway.echo_engine import EchoEngine, running_engine
from tests.gateway.envoy_process import REPOSITORY, Envoy, free_port, running_envoy, until, validate
from tests.gateway.stub_processor import Stub, running_stub

ENVOY = REPOSITORY / "envoy"
NAMES = ["envoy.yaml", "tls.yaml", "sidecar.yaml", "cluster-header.yaml", "fail-open.yaml"]
MESSAGE = b'{"model": "m",\n  "max_tokens": 12345678901234567890, "messages": []}'


def cluster(name: str, *addresses: str, list_hosts: bool | None = None) -> dict[str, Any]:
    """A completed cluster, with the override_host policy when it has several endpoints."""
    places = [address.rpartition(":") for address in addresses]
    hosts = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, _, port in places
    ]
    return complete(
        {
            "name": name,
            "type": "STATIC",
            "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
        },
        list_hosts=len(addresses) > 1 if list_hosts is None else list_hosts,
        keep_alive_s=5,
    )


def publish(live_dir: Path, *clusters: dict[str, Any]) -> None:
    write(live_dir / "clusters.yaml", render(clusters))


class Lab:
    """Envoy, the stub and two engines: ``a`` in a cluster of its own, both in the cluster ``pool``."""

    def __init__(
        self, envoy: Envoy, stub: Stub, a: EchoEngine, b: EchoEngine, session: aiohttp.ClientSession
    ) -> None:
        self.envoy, self.stub, self.a, self.b, self.session = envoy, stub, a, b, session

    async def post(
        self, path: str = "/v1/chat/completions", **options: Any
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case), body."""
        options.setdefault("data", MESSAGE)
        async with self.session.post(self.envoy.url + path, **options) as reply:
            return (
                reply.status,
                {key.lower(): value for key, value in reply.headers.items()},
                await reply.read(),
            )


@contextlib.asynccontextmanager
async def lab(tmp_path: Path, template: str = "envoy.yaml", **options: Any) -> AsyncIterator[Lab]:
    live = tmp_path / "live"
    address = f"unix:{live}/extproc.sock"
    async with contextlib.AsyncExitStack() as stack:
        a = await stack.enter_async_context(running_engine("a"))
        b = await stack.enter_async_context(running_engine("b"))
        dead = f"127.0.0.1:{free_port()}"
        publish(
            live,
            cluster("a", a.address),
            cluster("dead", dead),
            cluster("pool", a.address, b.address, dead),
            cluster("engine-1", a.address),
            cluster("engine-2", a.address),
            cluster("engine-3", b.address),
        )
        stub = await stack.enter_async_context(running_stub(address))
        static = template == "sidecar.yaml"
        envoy = await stack.enter_async_context(
            running_envoy(
                tmp_path,
                template=ENVOY / template,
                extproc_address=address,
                live_dir=None if static else live,
                **options,
            )
        )
        await envoy.healthy_processor()
        connector = aiohttp.TCPConnector(ssl=False) if envoy.scheme == "https" else None
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        stub.groups = ("a",)
        yield Lab(envoy, stub, a, b, session)


@pytest.mark.parametrize("name", NAMES)
async def test_envoy_accepts_the_file_as_it_is_shipped(name: str, tmp_path: Path) -> None:
    publish(tmp_path / "live")
    certificate(tmp_path / "tls")
    assert await validate(tmp_path, ENVOY / name) == ""


def test_variants_are_what_the_main_file_makes_them() -> None:
    done = subprocess.run(
        [sys.executable, "deploy/variants.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_engine_gets_the_clients_bytes_and_no_control_header(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        forged = {
            "x-gateway-request-id": "mine",
            "x-gateway-cluster": "dead",
            "x-gateway-destination-endpoint": "127.0.0.1:1",
            "x-gateway-tenant": "root",
            "x-envoy-max-retries": "9",
            "x-envoy-upstream-rq-timeout-ms": "1",
            "x-request-id": "client-id",
        }
        status, _, _ = await it.post(headers=forged)
        assert status == 200
        (received,) = it.a.received
        (seen,) = it.stub.requests
        assert received.body == MESSAGE
        assert received.headers["x-gateway-request-id"] == seen["x-gateway-request-id"] != "mine"
        assert received.headers["x-request-id"] == "client-id"
        assert not [name for name in seen if name.startswith(("x-envoy-max", "x-envoy-upstream"))]
        assert "x-gateway-tenant" not in seen
        assert [name for name in received.headers if name.startswith("x-gateway-")] == [
            "x-gateway-request-id"
        ]


async def test_metadata_becomes_response_headers_and_absent_metadata_does_not(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        _, headers, _ = await it.post()
        assert not [name for name in headers if name.startswith("x-gateway-")]
        it.stub.shown = {"endpoint": "a/127.0.0.1:1", "pool": "p", "id": "123"}
        _, headers, _ = await it.post()
        assert {name: headers[name] for name in headers if name.startswith("x-gateway-")} == {
            "x-gateway-endpoint": "a/127.0.0.1:1",
            "x-gateway-pool": "p",
            "x-gateway-request-id": "123",
        }


async def test_the_log_tells_tokens_and_first_byte_of_a_stream(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.a.chunks = 20
        status, _, body = await it.post()
        assert (status, body.count(b"data: ")) == (200, 22)
        await until(lambda: it.stub.logged("request"), 5, "a record of the request")
        (record,) = it.stub.logged("request")
        common = record.common_properties
        assert dict(common.metadata.filter_metadata["usage"]) == {"input": 7, "output": 20}
        assert int(common.custom_tags["ttft_us"]) > 0
        assert (
            record.request.request_headers["x-gateway-request-id"]
            == it.stub.requests[0]["x-gateway-request-id"]
        )
        assert it.stub.logged("attempt") == []
        assert it.stub.messages == 2


async def test_usage_of_a_json_reply(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.stub.shown = {"pool": "p"}
        await it.post()
        await until(lambda: it.stub.logged("request"), 5, "a record of the request")
        typed = it.stub.logged("request")[0].common_properties.metadata.typed_filter_metadata
        assert len(typed) == 1


async def test_a_failed_attempt_is_told_and_the_next_group_serves(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.stub.groups = ("dead", "a")
        body = MESSAGE + b" " * (20 << 20)
        status, headers, _ = await it.post(data=body)
        assert (status, headers["x-engine"]) == (200, "a")
        assert it.a.received[0].body == body
        await until(lambda: it.stub.logged("attempt") and it.stub.logged("request"), 5, "both records")
        (attempt,) = it.stub.logged("attempt")
        assert attempt.common_properties.upstream_cluster == "dead"
        assert (
            attempt.request.request_headers["x-gateway-request-id"]
            == it.stub.requests[0]["x-gateway-request-id"]
        )


class TestHostList:
    """One entry of the list for every attempt whose cluster has the policy, in the order of the attempts."""

    async def test_every_attempt_takes_the_next_entry(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            dead = await address_of(it, "dead")
            it.stub.groups, it.stub.hosts = ("pool", "pool"), f"{dead},{it.b.address}"
            assert [(await it.post())[1]["x-engine"] for _ in range(6)] == ["b"] * 6

    async def test_a_cluster_without_the_policy_takes_none(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            dead = await address_of(it, "dead")
            it.stub.groups, it.stub.hosts = ("dead", "pool"), it.b.address
            assert [(await it.post())[1]["x-engine"] for _ in range(6)] == ["b"] * 6
            it.stub.groups, it.stub.hosts = ("pool", "dead", "pool"), f"{dead},{it.b.address}"
            assert [(await it.post())[1]["x-engine"] for _ in range(6)] == ["b"] * 6

    async def test_an_entry_of_another_cluster_is_skipped_for_good(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            it.stub.groups, it.stub.hosts = ("pool",), f"127.0.0.9:9,{it.b.address}"
            assert [(await it.post())[1]["x-engine"] for _ in range(6)] == ["b"] * 6


async def test_503_from_an_engine_is_tried_elsewhere_and_500_is_not(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.stub.groups, it.stub.hosts = ("a", "pool"), it.b.address
        it.a.status = 503
        assert (await it.post())[1]["x-engine"] == "b"
        it.a.status = 500
        assert (await it.post())[0] == 500


class TestErrors:
    async def test_too_large_bodies_in_both_dialects(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            body = b"x" * (70 << 20)
            status, _, reply = await it.post(data=body)
            assert status == 413
            assert json.loads(reply)["error"]["code"] == "request_too_large"
            status, _, reply = await it.post("/v1/messages", data=body)
            assert status == 413
            assert json.loads(reply) == {
                "type": "error",
                "error": {
                    "type": "request_too_large",
                    "message": "The request body is larger than this gateway accepts.",
                },
            }

    async def test_our_own_replies_pass_as_they_are(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            it.stub.reject = (429, b'{"error": "ours"}', "gateway_rate_limit")
            assert (await it.post())[::2] == (429, b'{"error": "ours"}')

    async def test_no_engine_left(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            it.stub.groups = ("dead",)
            status, headers, reply = await it.post()
            assert (status, headers["content-type"]) == (503, "application/json")
            assert json.loads(reply)["error"]["type"] == "gateway_error"

    async def test_an_undecided_request_goes_nowhere(self, tmp_path: Path) -> None:
        async with lab(tmp_path) as it:
            it.stub.groups = ()
            assert (await it.post())[0] == 503
            assert it.a.received == []


async def test_websocket(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.session.ws_connect(it.envoy.url + "/v1/realtime") as socket:
        await socket.send_str("hello")
        assert await socket.receive_str(timeout=5) == "hello"


async def test_tls_speaks_http_1_and_2(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    certificate(directory)
    async with lab(tmp_path, "tls.yaml", scheme="https") as it:
        assert (await it.post())[1]["x-engine"] == "a"
        assert await negotiated(it.envoy.port) == "h2"
        with pytest.raises(aiohttp.ClientError):
            await it.session.get(f"http://127.0.0.1:{it.envoy.port}/")


async def test_sidecar_uses_the_clusters_in_its_own_file(tmp_path: Path) -> None:
    async with running_engine("mesh") as engine:

        def point(document: dict[str, Any]) -> None:
            for item in document["static_resources"]["clusters"]:
                if item["name"].startswith("llama"):
                    place = item["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
                    place["socket_address"] = {"address": "localhost", "port_value": engine.port}

        async with lab(tmp_path, "sidecar.yaml", change=point) as it:
            it.stub.groups = ("llama-1",)
            assert (await it.post())[1]["x-engine"] == "mesh"


async def test_cluster_header_alone_routes_and_falls_back_inside_the_cluster(tmp_path: Path) -> None:
    async with lab(tmp_path, "cluster-header.yaml") as it:
        assert (await it.post())[1]["x-engine"] == "a"
        assert "x-gateway-cluster" not in it.a.received[0].headers
        dead = await address_of(it, "dead")
        it.stub.groups, it.stub.hosts = ("pool",), f"{dead},{it.b.address}"
        assert [(await it.post())[1]["x-engine"] for _ in range(4)] == ["b"] * 4


async def test_fail_open_serves_without_extproc(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/live/nobody.sock"
    async with running_engine("a") as engine:
        publish(tmp_path / "live", *(cluster(f"engine-{number}", engine.address) for number in (1, 2, 3)))
        async with (
            running_envoy(
                tmp_path,
                template=ENVOY / "fail-open.yaml",
                extproc_address=address,
                live_dir=tmp_path / "live",
            ) as envoy,
            aiohttp.ClientSession() as session,
        ):
            for _ in range(3):
                async with session.post(envoy.url + "/v1/chat/completions", data=MESSAGE) as reply:
                    assert reply.status == 200


async def test_closed_without_extproc(tmp_path: Path) -> None:
    publish(tmp_path / "live")
    address = f"unix:{tmp_path}/live/nobody.sock"
    async with (
        running_envoy(tmp_path, extproc_address=address, live_dir=tmp_path / "live") as envoy,
        aiohttp.ClientSession() as session,
        session.post(envoy.url + "/v1/chat/completions", data=MESSAGE) as reply,
    ):
        assert reply.status == 503
        assert "error" in await reply.json()


async def address_of(it: Lab, name: str) -> str:
    """The address of a cluster's only endpoint, as Envoy has it."""
    async with it.session.get(it.envoy.admin_url + "/clusters?format=json") as reply:
        statuses = (await reply.json(content_type=None))["cluster_statuses"]
    (found,) = (status for status in statuses if status["name"] == name)
    place = found["host_statuses"][0]["address"]["socket_address"]
    return f"{place['address']}:{place['port_value']}"


def certificate(directory: Path) -> None:
    """A self-signed certificate where tls.yaml looks for one."""
    directory.mkdir()
    (directory / "certificate.yaml").write_text((ENVOY / "tls" / "certificate.yaml").read_text())
    files = ["-keyout", str(directory / "tls.key"), "-out", str(directory / "tls.crt")]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run([*command, *files], check=True, capture_output=True)


async def negotiated(port: int) -> str | None:
    """The protocol that TLS agrees on with a client that speaks HTTP/2."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        agreed: str | None = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        return agreed
    finally:
        writer.close()
