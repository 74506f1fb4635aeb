"""Fixtures for tests with a real Envoy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests start processes while they have gRPC channels of their own; gRPC must not mind the fork before exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture
def live_dir(tmp_path: Path) -> Path:
    """The directory that Envoy and extproc share."""
    path = tmp_path / "live"
    path.mkdir()
    return path


@pytest.fixture
def extproc_address(live_dir: Path) -> str:
    """The Unix socket extproc listens on."""
    return f"unix:{live_dir}/extproc.sock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes need a share of the machine: a test that went without is repeated, and the report says so."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=2))
