"""What ``extproc check`` says of releases, shadows and guards."""

from __future__ import annotations

from pathlib import Path

from extproc.config.lint import lint
from extproc.config.load import load
from extproc.config.schema import Settings
from extproc.config.yaml_source import Document, read

SHIPPED = Path(__file__).parents[2] / "envoy" / "envoy.yaml"
CLUSTERS = """\
resources:
- name: one
  type: STATIC
  metadata: {filter_metadata: {extproc: {pool: llama, model: m, version: v1}}}
  load_assignment:
    cluster_name: one
    endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 10.0.0.1, port_value: 8000}}}}]}]
"""


def bootstrap(old: str = "", new: str = "") -> Document:
    text = SHIPPED.read_text()
    assert not old or text.count(old) == 1
    return read(text.replace(old, new) if old else text, "envoy.yaml")


def warnings(folder: Path, settings: str) -> list[str]:
    (folder / "envoy").mkdir()
    (folder / "envoy" / "clusters.yaml").write_text(CLUSTERS)
    (folder / "extproc.yaml").write_text(settings)
    return [problem.message for problem in load(folder / "extproc.yaml").warnings]


def test_the_shipped_guards_and_shadow_are_fine() -> None:
    assert lint(bootstrap(), Settings()) == []


def test_a_shadow_listener_that_clients_can_reach_is_a_fault() -> None:
    document = bootstrap(
        "address: {pipe: {path: live/shadow.sock}}\n    per_connection",
        "address: {socket_address: {address: 0.0.0.0, port_value: 8081}}\n    per_connection",
    )
    (problem,) = lint(document, Settings())
    assert problem.fatal
    assert "clients could reach the shadow listener" in problem.message


def test_versions_that_no_cluster_has_are_named(tmp_path: Path) -> None:
    release = "{baseline: v1, candidate: v3, steps: 100 %}"
    (warning,) = warnings(tmp_path, f"pools: {{llama: {{release: {release}}}}}\n")
    assert warning == ("no cluster of pool `llama` has version `v3` in its metadata. There are: v1")


def test_weights_beside_a_release_are_called_unused(tmp_path: Path) -> None:
    said = warnings(
        tmp_path,
        "pools: {llama: {release: {baseline: v1, candidate: v1b, steps: 100 %}}}\n"
        "routes: [{name: r, pool: llama, weights: {v1: 1}}]\n",
    )
    assert any("these weights are not used" in warning for warning in said)
