"""The gatekeeper follows the clock: a window that opens changes rules in the running core."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from extproc.config.load import load
from extproc.config.snapshot import Snapshot
from extproc.core import Core
from extproc.edge.gatekeeper import Gatekeeper, client_address
from extproc.edge.limit_state import load_state, save_state
from extproc.routing.tenant import Tenant
from tests.unit.test_tenants_config import CLUSTERS


def snapshot_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    monkeypatch.chdir(folder)
    (folder / "envoy").mkdir()
    (folder / "envoy" / "clusters.yaml").write_text(CLUSTERS)
    (folder / "keys").write_text("sk-1\n")
    (folder / "extproc.yaml").write_text(
        "tenants: {a: {keys: 'file:keys', limits: {rpm: 60}}}\n"
        "schedules: [{name: night, begin: 22:00, end: '06:00', tenants: {a: {rpm: 600}}}]\n"
    )
    return load(Path("extproc.yaml"))


def test_a_window_that_opens_changes_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = snapshot_in(tmp_path, monkeypatch)
    core = Core(rng=random.Random(1))
    wall = datetime(2026, 1, 5, 21, 59, 30, tzinfo=UTC).timestamp()
    now = 0.0
    keeper = Gatekeeper(core, lambda: snapshot, tmp_path, clock=lambda: now, wall=lambda: wall + now)
    router, rules = keeper.rules(snapshot)
    core.install(router, snapshot.clusters.endpoints, rules, now)

    def rpm() -> float | None:
        (meter,) = core.admission.limiter.meters(Tenant("a"), "m-big", "big", "", now)
        return meter.limit.rpm

    assert (keeper.open_schedules, rpm()) == ((), 60)
    now = 31.0
    keeper._follow_schedules()
    assert (keeper.open_schedules, rpm()) == (("night",), 600)


def test_state_is_written_in_one_step_and_nonsense_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "state" / "limits.json"
    state = {
        "days": {"tenant\0a": (20_000, 12.0)},
        "replies": [("m", True, [200.0, 10.0, 5.0])],
        "models": {},
        "speeds": {"llama": (30_000.0, 3e-5)},
    }
    assert save_state(path, state, {}) == state
    assert save_state(path, state, state) is state
    assert list(path.parent.iterdir()) == [path]
    core = Core(rng=random.Random(1))
    load_state(path, core)
    assert core.admission.sizes.tokens("m", True, 400) == 20
    assert core.models.attention("llama").share == 3e-5
    assert core.admission.limiter.used_today(20_000) == {"tenant\0a": (20_000, 12.0)}
    for nonsense in (
        "",
        "[]",
        '{"days": {"x": 1}}',
        '{"days": {}, "replies": [["m", true, [0, 0, 0]]], "models": 3}',
    ):
        path.write_text(nonsense)
        load_state(path, Core(rng=random.Random(1)))


def test_the_clients_address_is_what_envoy_says() -> None:
    assert (
        client_address({"x-envoy-external-address": "10.0.0.1", "x-forwarded-for": "1.1.1.1"}) == "10.0.0.1"
    )
    assert client_address({"x-forwarded-for": "1.1.1.1, 10.0.0.2"}) == "10.0.0.2"
    assert client_address({}) == ""
