"""Alert rules: valid, tested by promtool, about metrics that exist, each with a page of the runbook."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.catalogue_use import mistakes

ROOT = Path(__file__).parents[2]
RULES, TESTS = ROOT / "deploy/alerts.yml", ROOT / "deploy/alerts_test.yml"
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in ALERTS]
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (of Prometheus) is not installed")


def promtool(*arguments: str) -> None:
    ran = subprocess.run([str(PROMTOOL), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_promtool_finds_the_rules_valid() -> None:
    promtool("check", "rules", str(RULES))


@needs_promtool
def test_promtool_finds_the_configuration_valid() -> None:
    promtool("check", "config", "deploy/prometheus.yml")


@needs_promtool
def test_the_rules_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(TESTS))


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_every_alert_is_about_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert not mistakes(rule["expr"])


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_every_alert_has_a_page_that_names_it(rule: dict[str, Any]) -> None:
    page = ROOT / rule["annotations"]["runbook_url"]
    assert rule["alert"] in page.read_text()
    assert rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("page", "ticket")


@pytest.mark.parametrize("name", NAMES)
def test_every_alert_is_tested_firing_and_silent(name: str) -> None:
    asked = [
        case
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert any(case.get("exp_alerts") for case in asked)
    assert any(not case.get("exp_alerts") for case in asked)


def test_names_are_used_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
