"""The Grafana dashboard is what its code makes, and asks only for metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.dashboard import FILE, render
from deploy.grafana.rows import ROWS
from tests.unit.catalogue_use import known, mistakes, used

ROOT = Path(__file__).parents[2]
PROMTOOL = shutil.which("promtool")
QUERIES = [
    (graph.title, query, legend) for row in ROWS for graph in row.graphs for query, legend in graph.queries
]
_BY = re.compile(r"\bby \(([^)]*)\)")
_SHOWN = re.compile(r"\{\{(\w+)\}\}")


def panels() -> list[dict[str, Any]]:
    return list(json.loads(FILE.read_text())["panels"])


def test_the_json_is_what_the_code_makes() -> None:
    assert FILE.read_text() == render(), "run `python -m deploy.grafana.dashboard`"


@pytest.mark.parametrize(("title", "query", "legend"), QUERIES)
def test_every_query_asks_for_what_exists(title: str, query: str, legend: str) -> None:
    assert used(query)
    assert not mistakes(query)
    labels = set().union(*(known()[use.name] for use in used(query))) | {"instance"}
    grouped = {name.strip() for names in _BY.findall(query) for name in names.split(",")}
    assert grouped <= labels
    assert set(_SHOWN.findall(legend)) <= (grouped or labels), "a legend of a label that the result has not"


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (of Prometheus) is not installed")
def test_every_query_is_promql(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "1m").replace("$pool", "a|b") for _, query, _ in QUERIES]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_metric_of_a_pool_obeys_the_choice_of_pools() -> None:
    for _, query, _ in QUERIES:
        for use in used(query):
            if "pool" in known()[use.name]:
                assert "pool" in use.labels, query


def test_panels_stand_beside_each_other_and_have_numbers_of_their_own() -> None:
    places, numbers = set(), set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        places.add((place["x"], place["y"]))
        numbers.add(panel["id"])
    assert len(places) == len(numbers) == len(panels())


def test_every_panel_says_what_it_shows() -> None:
    assert all(panel["description"] for panel in panels() if panel["type"] != "row")


def test_compose_gives_grafana_the_dashboard_and_its_source() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    grafana = compose["grafana"]
    assert all(port.startswith("127.0.0.1:") for port in grafana["ports"])
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    mounted = {volume.split(":")[1]: ROOT / volume.split(":")[0] for volume in grafana["volumes"]}
    assert mounted["/etc/grafana/dashboards/dashboard.json"] == FILE
    provisioning = mounted["/etc/grafana/provisioning"]
    source = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose
    provider = yaml.safe_load((provisioning / "dashboards/extproc.yml").read_text())["providers"][0]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
