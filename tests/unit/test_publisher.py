"""Publishing clusters, watching files, resolving names: what each promises, without an Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from extproc.config.clusters import DnsName
from extproc.edge.envoy_admin import AdminUnreachable, CdsState, EnvoyAdmin
from extproc.edge.publisher import Publication, Publisher, render, union, write
from extproc.edge.resolver import Resolver, choose
from extproc.edge.watcher import changes, fingerprint
from extproc.fleet.endpoint import EndpointSpec


def cluster(name: str, *hosts: str) -> dict[str, Any]:
    items = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": 80}}}} for host in hosts
    ]
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": items}]},
    }


def hosts(resource: dict[str, Any]) -> list[str]:
    return [
        item["endpoint"]["address"]["socket_address"]["address"]
        for group in resource["load_assignment"]["endpoints"]
        for item in group["lb_endpoints"]
    ]


def names(path: Path) -> list[str]:
    return [resource["name"] for resource in json.loads(path.read_text())["resources"]]


class FakeEnvoy(EnvoyAdmin):
    """Takes the live file ``after`` questions, or refuses it."""

    def __init__(self, path: Path, *, after: int = 2, refuses: bool = False, up: bool = True) -> None:
        super().__init__("unix:/nowhere")
        self.path, self.after, self.refuses, self.up = path, after, refuses, up
        self.taken = CdsState("", 0)
        self.asked = 0

    async def cds(self) -> CdsState:
        if not self.up:
            raise AdminUnreachable("down")
        self.asked += 1
        if self.asked > self.after and self.path.exists():
            version = json.loads(self.path.read_text())["version_info"]
            if self.refuses and version != self.taken.version:
                self.taken = CdsState(self.taken.version, self.taken.rejected + 1)
            else:
                self.taken = CdsState(version, self.taken.rejected)
        return self.taken

    async def clusters(self) -> frozenset[str]:
        return frozenset(names(self.path))


class TestPublisher:
    async def test_additions_are_live_when_publish_returns_and_removals_wait(self, tmp_path: Path) -> None:
        publisher = Publisher(tmp_path, FakeEnvoy(tmp_path / "clusters.yaml"))
        assert await publisher.publish([cluster("a"), cluster("b")]) is Publication.USED
        wanted = [cluster("b"), cluster("c")]
        assert await publisher.publish(wanted) is Publication.USED
        assert names(publisher.path) == ["a", "b", "c"]
        assert publisher.removes(wanted)

        left = asyncio.Event()
        removal = asyncio.create_task(publisher.finish_removal(wanted, left.wait, 10))
        await asyncio.sleep(0)
        assert names(publisher.path) == ["a", "b", "c"]
        left.set()
        assert await removal
        assert names(publisher.path) == ["b", "c"]
        assert not publisher.removes(wanted)

    async def test_a_removal_does_not_wait_beyond_its_deadline(self, tmp_path: Path) -> None:
        publisher = Publisher(tmp_path, blind_wait_s=0)
        await publisher.publish([cluster("a")])
        assert await publisher.finish_removal([], asyncio.Event().wait, 0.01)
        assert names(publisher.path) == []

    async def test_a_newer_publish_ends_a_waiting_removal(self, tmp_path: Path) -> None:
        publisher = Publisher(tmp_path, blind_wait_s=0)
        await publisher.publish([cluster("a"), cluster("b")])
        left = asyncio.Event()
        removal = asyncio.create_task(publisher.finish_removal([cluster("b")], left.wait, 10))
        await asyncio.sleep(0)
        await publisher.publish([cluster("a"), cluster("b"), cluster("c")])
        left.set()
        assert not await removal
        assert names(publisher.path) == ["a", "b", "c"]

    async def test_a_refused_file_is_taken_back(self, tmp_path: Path) -> None:
        envoy = FakeEnvoy(tmp_path / "clusters.yaml")
        publisher = Publisher(tmp_path, envoy)
        await publisher.publish([cluster("a")])
        envoy.refuses = True
        assert await publisher.publish([cluster("a"), cluster("bad")]) is Publication.REFUSED
        assert names(publisher.path) == ["a"]
        assert not publisher.removes([cluster("a")])

    async def test_equal_content_is_not_written_again(self, tmp_path: Path) -> None:
        publisher = Publisher(tmp_path, blind_wait_s=0)
        await publisher.publish([cluster("a"), cluster("b")])
        before = publisher.path.stat().st_ino
        assert await publisher.publish([cluster("b"), cluster("a")]) is Publication.UNCHANGED
        assert publisher.path.stat().st_ino == before

    async def test_without_an_envoy_it_is_written_and_unconfirmed(self, tmp_path: Path) -> None:
        publisher = Publisher(tmp_path / "new", FakeEnvoy(tmp_path / "new" / "clusters.yaml", up=False))
        assert await publisher.publish([cluster("a")]) is Publication.UNCONFIRMED
        assert names(publisher.path) == ["a"]

    async def test_an_envoy_that_does_not_move_is_late_in_bounded_time(self, tmp_path: Path) -> None:
        publisher = Publisher(tmp_path, FakeEnvoy(tmp_path / "clusters.yaml", after=10_000), wait_s=0.1)
        assert await publisher.publish([cluster("a")]) is Publication.LATE

    def test_the_union_keeps_endpoints_that_go_and_the_new_settings(self) -> None:
        new = {**cluster("a", "10.0.0.2"), "connect_timeout": "9s"}
        (merged,) = union([cluster("a", "10.0.0.1", "10.0.0.2")], [new])
        assert hosts(merged) == ["10.0.0.2", "10.0.0.1"]
        assert merged["connect_timeout"] == "9s"
        assert hosts(new) == ["10.0.0.2"]

    def test_the_file_is_readable_for_envoys_user_and_no_scrap_stays(self, tmp_path: Path) -> None:
        write(tmp_path / "clusters.yaml", render([cluster("a")]))
        assert os.listdir(tmp_path) == ["clusters.yaml"]
        assert (tmp_path / "clusters.yaml").stat().st_mode & 0o777 == 0o644

    def test_a_failed_write_leaves_the_old_file_and_no_scrap(self, tmp_path: Path) -> None:
        write(tmp_path / "clusters.yaml", "old")
        with pytest.raises(UnicodeEncodeError):
            write(tmp_path / "clusters.yaml", "\ud800")
        assert os.listdir(tmp_path) == ["clusters.yaml"]
        assert (tmp_path / "clusters.yaml").read_text() == "old"


@contextlib.asynccontextmanager
async def watching(*paths: Path) -> AsyncIterator[AsyncIterator[frozenset[Path]]]:
    watch = changes(paths, settle_s=0.05, since=fingerprint(paths))
    try:
        yield watch
    finally:
        await watch.aclose()  # type: ignore[attr-defined]


async def following(watch: AsyncIterator[frozenset[Path]]) -> frozenset[Path]:
    return await asyncio.wait_for(anext(watch), 10)


class TestWatcher:
    async def test_two_edits_together_are_one_change(self, tmp_path: Path) -> None:
        a, b = tmp_path / "a", tmp_path / "b"
        a.write_text("1")
        since = fingerprint([a, b])
        a.write_text("12")
        b.write_text("1")
        watch = changes([a, b], settle_s=0.05, since=since)
        assert await following(watch) == {a, b}
        await watch.aclose()  # type: ignore[attr-defined]

    async def test_a_rename_into_place_and_a_removal_are_changes(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_text("1")
        async with watching(path) as watch:
            waiting = asyncio.create_task(following(watch))
            await asyncio.sleep(0)
            (tmp_path / "new").write_text("2")
            os.replace(tmp_path / "new", path)
            assert await waiting == {path}
            path.unlink()
            assert await following(watch) == {path}

    async def test_a_swapped_link_is_a_change(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text(name)
        (tmp_path / "..data").symlink_to("one")
        path = tmp_path / "file"
        path.symlink_to("..data/file")
        async with watching(path) as watch:
            waiting = asyncio.create_task(following(watch))
            await asyncio.sleep(0)
            (tmp_path / "..next").symlink_to("two")
            os.replace(tmp_path / "..next", tmp_path / "..data")
            assert await waiting == {path}

    async def test_a_file_that_is_still_written_is_not_told(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_text("")
        watch = changes([path], settle_s=0.2, since=fingerprint([path]))
        waiting = asyncio.create_task(following(watch))
        for _ in range(8):
            with path.open("a") as file:
                file.write("x")
            await asyncio.sleep(0.05)
            assert not waiting.done()
        assert await waiting == {path}
        await watch.aclose()  # type: ignore[attr-defined]

    async def test_a_directory_that_does_not_exist_yet(self, tmp_path: Path) -> None:
        path = tmp_path / "later" / "a"
        async with watching(path) as watch:
            waiting = asyncio.create_task(following(watch))
            await asyncio.sleep(0)
            path.parent.mkdir()
            path.write_text("1")
            assert await waiting == {path}


def name(host: str, family: str = "V4_PREFERRED") -> DnsName:
    return DnsName(host, 80, EndpointSpec(host, f"{host}:80", "p"), many=True, family=family)


class TestResolver:
    async def test_a_failing_name_keeps_its_last_addresses(self) -> None:
        answers: dict[str, list[tuple[int, str]]] = {
            "a": [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.0.0.1")]
        }

        async def lookup(host: str, _port: int) -> Iterable[tuple[int, str]]:
            if host not in answers:
                raise OSError("no such name")
            return answers[host]

        resolver = Resolver([name("a"), name("b")], lookup=lookup)
        assert await resolver.refresh()
        assert resolver.addresses == {("a", 80): ("10.0.0.1", "10.0.0.2")}
        answers.clear()
        assert not await resolver.refresh()
        assert resolver.addresses == {("a", 80): ("10.0.0.1", "10.0.0.2")}
        assert resolver.failing == {("a", 80), ("b", 80)}
        resolver.watch([name("b")])
        assert resolver.addresses == {}

    async def test_a_question_without_an_answer_is_bounded(self) -> None:
        async def lookup(_host: str, _port: int) -> Iterable[tuple[int, str]]:
            await asyncio.Event().wait()
            return []

        resolver = Resolver([name("a")], lookup=lookup, timeout_s=0.01)
        assert not await resolver.refresh()
        assert resolver.failing == {("a", 80)}

    async def test_a_real_name(self) -> None:
        resolver = Resolver([name("localhost")])
        await resolver.refresh()
        assert resolver.addresses[("localhost", 80)] == ("127.0.0.1",)

    @pytest.mark.parametrize(
        ("family", "ips"),
        [
            ("AUTO", ("::1",)),
            ("V4_PREFERRED", ("127.0.0.1",)),
            ("V6_ONLY", ("::1",)),
            ("ALL", ("127.0.0.1", "::1")),
        ],
    )
    def test_the_family_is_envoys(self, family: str, ips: tuple[str, ...]) -> None:
        assert choose([(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")], family) == ips
