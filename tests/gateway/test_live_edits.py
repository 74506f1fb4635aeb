"""Both files are edited while requests run: no request notices, good files rule at once, bad ones change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.edge.bootstrap import socket_address
from tests.gateway.echo_engine import EchoEngine
from tests.gateway.envoy_process import free_port, until
from tests.gateway.gateway_process import Lab, chat, cluster, running_lab, write_clusters

SETTINGS = {"removal": {"drain_deadline": 5}}
NAMES = ("a", "b", "c", "d")


def all_but(engines: Mapping[str, EchoEngine], *without: str, **more: Any) -> list[dict[str, Any]]:
    return [cluster(name, engine.address, **more) for name, engine in engines.items() if name not in without]


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with running_lab(tmp_path, NAMES, all_but, SETTINGS) as running:
        yield running


async def reloads(lab: Lab, result: str) -> float:
    samples = await lab.extproc.metrics()
    return samples.get(f'extproc_config_reloads_total{{result="{result}"}}', 0.0)


class Edit:
    """Frames one edit: waits until it has been taken, or refused."""

    def __init__(self, lab: Lab, *, refused: bool = False) -> None:
        self._lab = lab
        self._result = "rejected" if refused else "applied"
        self._before = 0.0

    async def __aenter__(self) -> None:
        self._before = await reloads(self._lab, self._result)

    async def __aexit__(self, kind: object, *_rest: object) -> None:
        if kind is None:
            await until(self._done, 10, f"the edit is {self._result}")

    async def _done(self) -> bool:
        return await reloads(self._lab, self._result) > self._before


async def endpoints(lab: Lab) -> set[str]:
    return set(await lab.extproc.fleet())


class Load:
    """Requests without end; every answer that is not 200 is kept."""

    def __init__(self, lab: Lab, clients: int = 6) -> None:
        self.count = 0
        self.bad: list[tuple[int, bytes]] = []
        self._lab = lab
        self._over = False
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]

    async def _client(self, number: int) -> None:
        while not self._over:
            status, _, body = await self._lab.post(
                chat(f"{number} {self.count % 7}", stream=bool(number % 2))
            )
            self.count += 1
            if status != 200 or (number % 2 and not body.endswith(b"[DONE]\n\n") and b"choices" not in body):
                self.bad.append((status, body))
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)


def write_settings(lab: Lab, **changes: Any) -> None:
    path = lab.gateway.config_file
    temporary = path.with_suffix(".new")
    temporary.write_text(yaml.safe_dump(lab.gateway.settings | changes, sort_keys=False))
    temporary.rename(path)


async def test_50_edits_under_load_lose_no_request(lab: Lab) -> None:
    """Adding, changing, removing, renaming, half-written and bad files, in clusters.yaml and in extproc.yaml."""
    rng = random.Random(11)
    for name in ("c", "d"):
        lab[name].chunks = 3
    load = Load(lab)
    file, config = lab.gateway.clusters_file, lab.gateway.config_file
    good: list[dict[str, Any]] = all_but(lab.engines)
    kinds: Counter[str] = Counter()
    for number in range(50):
        kind = ("remove", "add", "bad", "half", "change", "rename", "settings", "bad settings", "in place")[
            number % 9
        ]
        kinds[kind] += 1
        if kind == "remove":
            good = all_but(lab.engines, rng.choice(NAMES))
            async with Edit(lab):
                write_clusters(file, good)
            assert len(await endpoints(lab)) == 3
        elif kind == "add":
            good = all_but(lab.engines)
            async with Edit(lab):
                write_clusters(file, good)
            assert len(await endpoints(lab)) == 4
        elif kind == "change":
            good = all_but(lab.engines, weight=float(number), labels={"edit": str(number)})
            async with Edit(lab):
                write_clusters(file, good)
        elif kind == "rename":
            renamed = [cluster(f"{n}-{number}" if n == "a" else n, e.address) for n, e in lab.engines.items()]
            async with Edit(lab):
                write_clusters(file, renamed)
            assert f"a-{number}" in await endpoints(lab)
            async with Edit(lab):
                write_clusters(file, good)
        elif kind == "bad":
            async with Edit(lab, refused=True):
                write_clusters(file, [*good, cluster("bad", "127.0.0.1:1", max_concurency=3)])
            async with Edit(lab):
                write_clusters(file, good)
        elif kind == "half":
            text = file.read_text()
            async with Edit(lab, refused=True):
                file.write_text(text[: len(text) // 2] + "\n  {")
            async with Edit(lab):
                file.write_text(text)
        elif kind == "in place":
            # As an editor that does not rename: the old text, then the new one, in two writes.
            text = yaml.safe_dump({"resources": good})
            async with Edit(lab):
                with file.open("w") as opened:
                    opened.write(text[:100])
                    opened.flush()
                    opened.write(text[100:] + f"# {number}\n")
        elif kind == "settings":
            async with Edit(lab):
                write_settings(
                    lab, pools={"pool": {"strategy": rng.choice(("round-robin", "least-requests"))}}
                )
        else:
            before = config.read_text()
            async with Edit(lab, refused=True):
                config.write_text(before + "poools: {}\n")
            async with Edit(lab):
                write_settings(lab)
    await load.stop()
    samples = await lab.extproc.metrics()
    applied, rejected = await reloads(lab, "applied"), await reloads(lab, "rejected")
    print(
        f"\n{dict(kinds)}: {load.count} requests, {len(load.bad)} failed; {applied:.0f} applied, {rejected:.0f} rejected"
    )
    assert load.bad == []
    assert load.count > 500
    assert rejected == kinds["bad"] + kinds["half"] + kinds["bad settings"]
    assert samples["extproc_config_generation"] == applied
    await lab.extproc.idle()
    assert (await lab.gateway.envoy.stats(r"cluster_manager\.cds\.update_(rejected|failure)")) == {
        "cluster_manager.cds.update_rejected": 0,
        "cluster_manager.cds.update_failure": 0,
    }


@pytest_asyncio.fixture(loop_scope="class", scope="class")
async def refusing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """One gateway for all edits that are refused."""
    async with running_lab(tmp_path_factory.mktemp("refusing"), NAMES, all_but, SETTINGS) as running:
        yield running


@pytest.mark.asyncio(loop_scope="class")
class TestABadFile:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("resources: [", "clusters.yaml:"),
            ("resources: {}\n", "must be a list"),
            ("resources:\n- name: x\n- name: x\n", "clusters.yaml:"),
            ("", "endpoints from pool"),
            (
                "resources:\n- name: x\n  cluster_type: {name: x, typed_config: "
                '{"@type": type.googleapis.com/google.protobuf.Struct}}\n',
                "a key 'value' is missing",
            ),
        ],
        ids=["no YAML", "no list", "twice", "empty", "incomplete"],
    )
    async def test_changes_nothing_and_is_told(self, refusing: Lab, text: str, said: str) -> None:
        lab = refusing
        before = await endpoints(lab)
        generation = (await lab.extproc.metrics())["extproc_config_generation"]
        async with Edit(lab, refused=True):
            lab.gateway.clusters_file.write_text(text)
        assert await endpoints(lab) == before
        assert (await lab.extproc.metrics())["extproc_config_generation"] == generation
        assert said in lab.extproc.log
        assert (await lab.post())[0] == 200
        async with Edit(lab):
            write_clusters(lab.gateway.clusters_file, all_but(lab.engines))

    async def test_of_settings_is_told_with_its_line(self, refusing: Lab) -> None:
        lab = refusing
        text = lab.gateway.config_file.read_text()
        async with Edit(lab, refused=True):
            lab.gateway.config_file.write_text(text + "pools: {pool: {stratgy: round-robin}}\n")
        line = len((text + "x").splitlines())
        assert f"extproc.yaml:{line}: " in lab.extproc.log
        assert "stratgy" in lab.extproc.log


class TestABigRemoval:
    async def test_needs_a_word(self, lab: Lab) -> None:
        async with Edit(lab, refused=True):
            write_clusters(lab.gateway.clusters_file, all_but(lab.engines, "a", "b", "c"))
        assert await endpoints(lab) == set(NAMES)
        async with Edit(lab):
            write_settings(lab, removal={"allow_big_removals": True})
        await until(lambda: _endpoints_are(lab, {"d"}), 5, "the removal is taken with its word")
        assert (await lab.post())[1]["x-engine"] == "d"

    async def test_of_half_a_pool_does_not(self, lab: Lab) -> None:
        async with Edit(lab):
            write_clusters(lab.gateway.clusters_file, all_but(lab.engines, "a", "b"))
        assert await endpoints(lab) == {"c", "d"}


async def _endpoints_are(lab: Lab, names: set[str]) -> bool:
    return await endpoints(lab) == names


class TestAdding:
    async def test_no_decision_is_made_for_a_cluster_before_envoy_has_it(self, tmp_path: Path) -> None:
        """Each new cluster takes load at once; a decision before its time would be a 503 ``NC``."""
        async with running_lab(tmp_path, NAMES, lambda e: all_but(e, "b", "c", "d"), SETTINGS) as lab:
            load = Load(lab, 8)
            for without in (("c", "d"), ("d",), ()):
                async with Edit(lab):
                    write_clusters(lab.gateway.clusters_file, all_but(lab.engines, *without))
                newest = lab[NAMES[3 - len(without)]]
                await until(lambda engine=newest: engine.begun > 3, 5, f"{newest.name} takes its share")
            await load.stop()
            assert load.bad == []

    async def test_endpoints_added_to_a_cluster_take_load(self, tmp_path: Path) -> None:
        def one(engines: Mapping[str, EchoEngine], count: int = 1) -> list[dict[str, Any]]:
            return [cluster("all", *[engine.address for engine in engines.values()][:count])]

        async with running_lab(tmp_path, NAMES, one, SETTINGS) as lab:
            load = Load(lab)
            for count in (2, 4):
                async with Edit(lab):
                    write_clusters(lab.gateway.clusters_file, one(lab.engines, count))
                wanted = [lab[name] for name in NAMES[:count]]
                await until(lambda engines=wanted: all(e.begun > 3 for e in engines), 5, "new ones take load")
            await load.stop()
            assert load.bad == []

    async def test_a_new_endpoint_takes_part_in_affinity(self, tmp_path: Path) -> None:
        async with running_lab(tmp_path, NAMES, lambda e: all_but(e, "c", "d"), SETTINGS) as lab:
            async with Edit(lab):
                write_clusters(lab.gateway.clusters_file, all_but(lab.engines))
            homes = set()
            for number in range(12):
                text = f"conversation {number % 4} " * 200 + f"turn {number}"
                _, headers, _ = await lab.post(chat(text))
                homes.add((number % 4, headers["x-engine"]))
                await lab.extproc.idle()
            assert len(homes) == 4
            assert {home for _, home in homes} & {"c", "d"}

    async def test_a_cluster_is_left_out_until_envoy_knows_its_addresses(self, lab: Lab) -> None:
        """The name is looked up where nobody answers at first: Envoy holds the cluster back, and so do we."""
        async with name_server() as names:
            resolver = (
                "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
            )
            waiting = cluster("waiting", f"engine.test:{lab['a'].port}") | {
                "type": "STRICT_DNS",
                "typed_dns_resolver_config": {
                    "name": "envoy.network.dns_resolver.cares",
                    "typed_config": {
                        "@type": resolver,
                        "resolvers": [socket_address("127.0.0.1", names.port)],
                    },
                },
            }
            only_a_new_one = [*all_but(lab.engines, "a"), waiting]
            load = Load(lab)
            async with Edit(lab):
                write_clusters(lab.gateway.clusters_file, only_a_new_one)
            assert names.asked > 0
            assert await endpoints(lab) == {"b", "c", "d"}
            names.silent = False
            await until(lambda: _endpoints_are(lab, {"b", "c", "d", "waiting"}), 15, "it is used")
            await load.stop()
            assert load.bad == []


@dataclass(slots=True)
class NameServer(asyncio.DatagramProtocol):
    """Says that every name is 127.0.0.1, once it speaks. Wire format: RFC 1035."""

    silent: bool = True
    asked: int = 0
    port: int = 0
    _transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.asked += 1
        if self.silent:
            return
        end = data.index(b"\0", 12) + 5
        is_a = data[end - 4 : end] == b"\0\1\0\1"
        head = data[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_a else b"\0\0") + b"\0\0\0\0"
        record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4\x7f\0\0\1" if is_a else b""
        self._transport.sendto(head + data[12:end] + record, addr)


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()


class TestRemoving:
    async def test_a_removed_endpoint_gets_no_more_and_its_streams_end_in_peace(self, lab: Lab) -> None:
        gate = asyncio.Event()
        for engine in lab.engines.values():
            engine.chunks, engine.gate = 3, gate
        running = [asyncio.create_task(lab.post(chat(f"{n}", stream=True))) for n in range(8)]
        await until(
            lambda: sum(engine.active for engine in lab.engines.values()) == 8, 5, "eight streams run"
        )
        async with Edit(lab):
            write_clusters(lab.gateway.clusters_file, all_but(lab.engines, "a"))
        assert await endpoints(lab) == {"b", "c", "d"}
        held = lab["a"].begun
        assert held == 2
        assert "a" in await _clusters(lab), "Envoy keeps the cluster while streams run"
        gate.set()
        for status, _, body in await asyncio.gather(*running):
            assert status == 200
            assert body.endswith(b"[DONE]\n\n")
        await until(lambda: _gone(lab, "a"), 10, "Envoy forgets the cluster")
        for number in range(12):
            assert (await lab.post(chat(f"{number}")))[0] == 200
        assert lab["a"].begun == held
        await lab.extproc.idle()

    async def test_the_deadline_ends_the_wait_and_not_the_stream(self, tmp_path: Path) -> None:
        settings = {"removal": {"drain_deadline": 0.3}}
        async with running_lab(tmp_path, ("a", "b"), all_but, settings) as lab:
            gate = asyncio.Event()
            lab["a"].chunks = lab["b"].chunks = 3
            lab["a"].gate = lab["b"].gate = gate
            running = [asyncio.create_task(lab.post(chat(f"{n}", stream=True))) for n in range(2)]
            await until(lambda: lab["a"].active == lab["b"].active == 1, 5, "both work")
            async with Edit(lab):
                write_clusters(lab.gateway.clusters_file, all_but(lab.engines, "a"))
            await until(lambda: _gone(lab, "a"), 10, "Envoy forgets the cluster")
            gate.set()
            for status, _, body in await asyncio.gather(*running):
                assert (status, body.endswith(b"[DONE]\n\n")) == (200, True)
            await lab.extproc.idle()

    async def test_its_series_vanish(self, lab: Lab) -> None:
        await lab.post()
        async with Edit(lab):
            write_clusters(lab.gateway.clusters_file, all_but(lab.engines, "a"))
        assert not [name for name in await lab.extproc.metrics() if 'endpoint="a/' in name]

    async def test_taken_back_before_it_is_gone(self, lab: Lab) -> None:
        load = Load(lab)
        for _ in range(3):
            async with Edit(lab):
                write_clusters(lab.gateway.clusters_file, all_but(lab.engines, "a"))
            async with Edit(lab):
                write_clusters(lab.gateway.clusters_file, all_but(lab.engines))
        await load.stop()
        assert load.bad == []
        assert await endpoints(lab) == set(NAMES)
        await lab.extproc.idle()


async def test_draining_gets_no_new_requests_and_undraining_does(lab: Lab) -> None:
    draining = [
        cluster(name, engine.address, state="draining" if name == "a" else "ready")
        for name, engine in lab.engines.items()
    ]
    async with Edit(lab):
        write_clusters(lab.gateway.clusters_file, draining)
    for number in range(12):
        assert (await lab.post(chat(f"{number}")))[1]["x-engine"] != "a"
    async with Edit(lab):
        write_clusters(lab.gateway.clusters_file, all_but(lab.engines))

    async def served() -> bool:
        await asyncio.gather(*(lab.post(chat(f"{number}")) for number in range(20)))
        return lab["a"].begun > 0

    await until(served, 15.0, "the undrained endpoint serves again")


async def test_a_cluster_that_envoy_refuses_changes_nothing(lab: Lab) -> None:
    """It reads well for us; only Envoy knows that the name of its policy means nothing."""
    odd = cluster("odd", f"127.0.0.1:{free_port()}") | {
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "no.such.policy",
                        "typed_config": {"@type": "type.googleapis.com/no.such.Policy"},
                    }
                }
            ]
        }
    }
    async with Edit(lab, refused=True):
        write_clusters(lab.gateway.clusters_file, [*all_but(lab.engines), odd])
    assert await endpoints(lab) == set(NAMES)
    assert [(await lab.post(chat(f"{n}")))[0] for n in range(8)] == [200] * 8


async def _clusters(lab: Lab) -> set[str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{lab.gateway.envoy.admin_url}/clusters?format=json") as reply,
    ):
        return {item["name"] for item in (await reply.json(content_type=None))["cluster_statuses"]}


async def _gone(lab: Lab, name: str) -> bool:
    return name not in await _clusters(lab)
