"""Operators register, remove, drain and undrain endpoints; what they said outlives the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from extproc.config.clusters import read_clusters
from extproc.config.problem import Problem
from extproc.config.registered import FILE, with_registered
from extproc.config.yaml_source import read
from extproc.edge.registrations import DRAINED, Refused, Registrations
from extproc.fleet.fleet import Fleet

CLUSTERS = """
resources:
- name: fixed
  metadata: {filter_metadata: {extproc: {pool: p, model: m}}}
  load_assignment:
    cluster_name: fixed
    endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 10.0.0.1, port_value: 8000}}}}]}]
"""


class Process:
    """One life of the gateway: a fleet that takes over the files when it is told to."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.fleet = Fleet()
        self.problems: tuple[Problem, ...] = ()
        self.removals_allowed: list[bool] = []
        self.registrations = Registrations(state_dir, self.fleet, self.reload)
        self.registrations.restore()
        self.take()

    async def reload(self, *, allow_removals: bool = False) -> tuple[Problem, ...]:
        self.removals_allowed.append(allow_removals)
        if not self.problems:
            self.take()
        return self.problems

    def take(self) -> None:
        self.fleet.apply(with_registered(read_clusters(read(CLUSTERS, "c.yaml")), self.state_dir).endpoints)

    def lives(self) -> dict[str, str]:
        return {e.spec.cluster: e.lifecycle.value for e in self.fleet.endpoints.values()}

    def register(self, **asked: Any) -> Mapping[str, Any]:
        return asyncio.run(self.registrations.register({"address": "10.0.0.9:8000", "pool": "p", **asked}))

    def remove(self, name: str) -> Mapping[str, Any]:
        return asyncio.run(self.registrations.remove(name))

    def drain(self, name: str) -> Mapping[str, Any]:
        return asyncio.run(self.registrations.drain(name))

    def undrain(self, name: str) -> Mapping[str, Any]:
        return asyncio.run(self.registrations.undrain(name))


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def refusal(status: int, act: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(Refused) as caught:
        act(*arguments, **named)
    assert caught.value.status == status
    return str(caught.value)


class TestRegister:
    def test_adds_an_endpoint_with_what_was_said_of_it(self, process: Process) -> None:
        done = process.register(model=["m", "n"], version="v2", weight=2.0, max_concurrency=64)
        assert done["registered"] == "registered-10.0.0.9-8000"
        spec = process.fleet.endpoints["registered-10.0.0.9-8000/10.0.0.9:8000"].spec
        assert (spec.models, spec.version, spec.weight, spec.max_concurrency) == (("m", "n"), "v2", 2.0, 64)

    def test_outlives_the_process(self, process: Process) -> None:
        process.register(name="new")
        assert Process(process.state_dir).lives() == {"fixed": "ready", "new": "ready"}

    def test_takes_names_and_ipv6(self, process: Process) -> None:
        process.register(address="engine.example:8000")
        process.register(address="[fd00::1]:8000")
        assert "registered-engine.example-8000/engine.example:8000" in process.fleet.endpoints
        assert "registered-fd00-1-8000/[fd00::1]:8000" in process.fleet.endpoints

    @pytest.mark.parametrize("address", [None, "", "10.0.0.1", ":8000", "a:0", "a:70000", "a:b", 7])
    def test_needs_an_address(self, process: Process, address: object) -> None:
        assert "HOST:PORT" in refusal(400, process.register, address=address)

    def test_needs_a_pool(self, process: Process) -> None:
        assert "pool" in refusal(400, process.register, pool="")

    def test_says_what_is_wrong_with_the_rest(self, process: Process) -> None:
        assert "unknown key `wait`" in refusal(400, process.register, wait=2)
        assert "`weight` must be a number above 0" in refusal(400, process.register, weight=-1)
        assert process.lives() == {"fixed": "ready"}

    def test_of_a_known_cluster_is_refused(self, process: Process) -> None:
        refusal(409, process.register, name="fixed")
        process.register(name="new")
        refusal(409, process.register, name="new")

    def test_that_envoy_refuses_is_forgotten(self, process: Process) -> None:
        process.problems = (Problem("c.yaml", 1, "Envoy refuses these clusters"),)
        assert "Envoy refuses" in refusal(422, process.register, name="new")
        assert Process(process.state_dir).lives() == {"fixed": "ready"}

    def test_where_envoy_has_its_clusters_in_the_bootstrap_is_refused(self, tmp_path: Path) -> None:
        there = Process(tmp_path)
        there.registrations = Registrations(tmp_path, there.fleet, there.reload, published=lambda: False)
        refusal(409, there.register)


class TestRemove:
    @pytest.mark.parametrize("name", ["new", "10.0.0.9:8000", "new/10.0.0.9:8000"])
    def test_forgets_a_registered_endpoint_by_any_of_its_names(self, process: Process, name: str) -> None:
        process.register(name="new")
        assert process.remove(name)["endpoints"][0]["lifecycle"] == "gone"
        assert process.lives() == {"fixed": "ready"}
        assert Process(process.state_dir).lives() == {"fixed": "ready"}

    def test_may_take_the_greater_part_of_a_pool(self, process: Process) -> None:
        process.register(name="new", pool="q")
        process.remove("new")
        assert process.removals_allowed == [False, True]

    def test_of_what_stands_in_a_file_is_refused(self, process: Process) -> None:
        assert "clusters file" in refusal(409, process.remove, "fixed")

    def test_of_nothing_is_refused(self, process: Process) -> None:
        refusal(404, process.remove, "nobody")

    def test_forgets_its_drain_too(self, process: Process) -> None:
        process.register(name="new")
        process.drain("new")
        process.remove("new")
        process.register(name="new")
        assert process.lives()["new"] == "ready"


class TestDrain:
    def test_outlives_reloads_and_the_process(self, process: Process) -> None:
        assert process.drain("fixed")["idle"]
        process.take()
        assert process.lives() == {"fixed": "draining"}
        again = Process(process.state_dir)
        assert again.lives() == {"fixed": "draining"}
        again.undrain("fixed")
        assert Process(process.state_dir).lives() == {"fixed": "ready"}

    def test_says_when_requests_still_run(self, process: Process) -> None:
        process.fleet.endpoints["fixed/10.0.0.1:8000"].leases = 2
        done = process.drain("10.0.0.1:8000")
        assert (done["idle"], done["endpoints"][0]["leases"]) == (False, 2)

    def test_of_nothing_is_refused(self, process: Process) -> None:
        refusal(404, process.drain, "nobody")
        refusal(404, process.undrain, "nobody")

    def test_waits_until_what_runs_has_ended(self, process: Process) -> None:
        endpoint = process.fleet.endpoints["fixed/10.0.0.1:8000"]
        endpoint.leases = 1

        async def act() -> Mapping[str, Any]:
            waiting = asyncio.create_task(process.registrations.drain("fixed", wait_s=30))
            while endpoint.lifecycle.value != "draining":
                await asyncio.sleep(0)
            endpoint.leases = 0
            return await waiting

        assert asyncio.run(act())["idle"]


@pytest.mark.parametrize("text", ["{", "[1, 2]", "resources: 7\n", "resources:\n- name: x\n  weight: 1\n"])
def test_a_spoilt_file_costs_its_endpoints_not_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    (tmp_path / DRAINED).write_text(text)
    clusters = with_registered(read_clusters(read(CLUSTERS, "c.yaml")), tmp_path)
    assert [spec.cluster for spec in clusters.endpoints] == ["fixed"]
    assert clusters.warnings
    assert not any(problem.fatal for problem in clusters.warnings)
    assert Process(tmp_path).lives() == {"fixed": "ready"}


def test_the_edited_file_rules_over_a_registration_of_the_same_name(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.register(name="new")
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace("new", "fixed"))
    clusters = with_registered(read_clusters(read(CLUSTERS, "c.yaml")), tmp_path)
    assert [spec.key for spec in clusters.endpoints] == ["fixed/10.0.0.1:8000"]
    assert "rules" in str(clusters.warnings[0])


def test_the_drains_are_plain_json(process: Process) -> None:
    process.drain("fixed")
    assert json.loads((process.state_dir / DRAINED).read_text()) == ["fixed/10.0.0.1:8000"]
