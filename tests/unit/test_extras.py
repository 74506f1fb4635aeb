"""What is an extra in pyproject.toml is not needed to start."""

from __future__ import annotations

import subprocess
import sys

EXTRAS = ("jinja2", "tokenizers", "redis")


def test_extproc_starts_without_any_extra() -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({EXTRAS!r}); import extproc.cli, extproc.gateway, extproc.demo"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
