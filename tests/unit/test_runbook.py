"""The runbook names only what exists: metrics, queries that parse, commands, admin pages, keys of the configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from extproc.cli import app
from extproc.edge import admin, admin_fleet, release_admin
from tests.unit.catalogue_use import mistakes

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/runbook").glob("*.md"))
CHECKED = [*PAGES, ROOT / "docs/tracing.md"]
NAMES = [page.name for page in CHECKED]
PROMTOOL = shutil.which("promtool")

_QUERIES = re.compile(r"```promql\n(.*?)```", re.DOTALL)
_INLINE_METRIC = re.compile(r"`(extproc_[^`]+)`")
_COMMAND = re.compile(r"(?:^ {4}|`)extproc ((?:[a-z-]+)(?: [a-z]+)?)([^`\n]*)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])(--[a-z-]+)")
_LINK = re.compile(r"\]\((?!https:)([^)#]+)")
_ADMIN = re.compile(r"(?:localhost:9902|`(?:GET|POST) )(/[a-zA-Z/]+)")
_KEY = re.compile(r"`([a-z_]+(?:\[\])?(?:\.[A-Za-z_]+)+)(?:: [^`]*)?`")
_CONFIGURATION = ROOT / "docs/configuration.md"


def keys() -> set[str]:
    """Every key of extproc.yaml, as docs/configuration.md (which is made from the schema) lists them."""
    found, section = set(), ""
    for line in _CONFIGURATION.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip("`") if "`" in line else ""
        elif line.startswith("| `"):
            key = line.split("`")[1]
            found.add(f"{section}.{key}" if section else key)
    return found


def commands() -> dict[str, set[str]]:
    """Each command and sub-command with its options."""
    found: dict[str, set[str]] = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = {option for parameter in command.params for option in parameter.opts}
        for below, inner in getattr(command, "commands", {}).items():
            found[f"{name} {below}"] = {option for parameter in inner.params for option in parameter.opts}
    return found


@pytest.fixture(params=CHECKED, ids=NAMES)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param.read_text())


def test_every_metric_exists(page: str) -> None:
    texts = [*_QUERIES.findall(page), *_INLINE_METRIC.findall(page)]
    assert not [mistake for text in texts for mistake in mistakes(text)]


def test_every_command_and_option_exists(page: str) -> None:
    known = commands()
    for words, rest in _COMMAND.findall(page):
        name = words if words in known else words.split()[0]
        assert name in known, f"extproc {words}"
        assert set(_OPTION.findall(rest)) <= known[name], f"extproc {words}{rest}"


def test_every_page_that_is_linked_exists(page: str) -> None:
    for link in _LINK.findall(page):
        assert (ROOT / "docs/runbook" / link).exists() or (ROOT / "docs" / link).exists(), link


def test_every_key_of_the_configuration_exists(page: str) -> None:
    known = keys()
    top = {key.partition(".")[0] for key in known} | {"routes[]"}
    for key in _KEY.findall(page):
        if key.partition(".")[0] in top:
            assert key in known, key


def test_every_admin_page_exists(page: str) -> None:
    described = "".join(str(module.__doc__) + Path(str(module.__file__)).read_text() for module in ADMIN)
    for path in _ADMIN.findall(page):
        assert path.replace("POOL", "{pool}") in described or f" {path}" in described, path


ADMIN = (admin, admin_fleet, release_admin)


def test_every_page_stands_in_the_index() -> None:
    index = (ROOT / "docs/runbook/README.md").read_text()
    assert not [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name
)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 45


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (of Prometheus) is not installed")
def test_every_query_is_promql(tmp_path: Path) -> None:
    queries = [
        line
        for page in CHECKED
        for block in _QUERIES.findall(page.read_text())
        for line in block.splitlines()
    ]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": rules}]}))
    ran = subprocess.run(
        [str(PROMTOOL), "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
