"""Fixtures for tests with a real Envoy."""

from __future__ import annotations

from pathlib import Path

import pytest


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
