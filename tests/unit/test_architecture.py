"""The rules that keep the house livable: who may import whom, and that the core has no clock, socket or event loop."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "extproc"

CORE = (
    "api",
    "routing",
    "admission",
    "limits",
    "scheduling",
    "kvcache",
    "fleet",
    "engines",
    "release",
    "replay",
)
CORE_FILES = ("ledger.py", "outcome.py", "telemetry/decision.py")
FORBIDDEN = {
    "asyncio",
    "socket",
    "threading",
    "selectors",
    "aiohttp",
    "grpc",
    "zmq",
    "watchfiles",
    "requests",
    "httpx",
    "time",
    "logging",
}
OUTER = ("extproc.edge", "extproc.gateway", "extproc.cli", "extproc.config", "extproc.demo")

LAYERS = {
    "engines": set(),
    "api": {"routing.rejection"},
    "fleet": {"engines", "api"},
    "routing": {"api"},
    "kvcache": {"api", "fleet", "engines"},
    "scheduling": {"kvcache", "fleet", "engines", "api"},
    "limits": {"routing", "api"},
}
"""Room -> rooms it may import beside itself."""


def modules(path: Path) -> set[str]:
    """Names of all modules that a file imports at run time."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def core_files() -> list[Path]:
    files = [ROOT / name for name in CORE_FILES if (ROOT / name).exists()]
    for room in CORE:
        files += sorted((ROOT / room).rglob("*.py"))
    return files


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_has_no_clock_socket_or_event_loop(path: Path) -> None:
    allowed = (
        {"time"}
        if path.parts[-2] == "replay" and path.name in ("report.py", "cli.py", "progress.py")
        else set()
    )
    used = {name.split(".")[0] for name in modules(path)}
    assert not used & (FORBIDDEN - allowed)


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_does_not_know_the_edge(path: Path) -> None:
    assert not [name for name in modules(path) if name.startswith(OUTER)]


@pytest.mark.parametrize("room", sorted(LAYERS))
def test_arrows_point_down(room: str) -> None:
    allowed = {room, "outcome", *LAYERS[room]}
    for path in sorted((ROOT / room).rglob("*.py")):
        for name in modules(path):
            if name.startswith("extproc.") and name.count(".") >= 1:
                inner = name.removeprefix("extproc.")
                assert any(inner == ok or inner.startswith(f"{ok}.") for ok in allowed), (
                    f"{path.name}: {name}"
                )


def test_no_folder_of_ours_takes_the_import_name_envoy() -> None:
    assert not list(ROOT.parent.glob("envoy/**/__init__.py"))
