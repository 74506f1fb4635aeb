"""Small files that survive a restart."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def installation_seed(state_dir: Path) -> int:
    """The installation's secret for block hashes, made on the first start; readable by us alone.

    Without a writable directory a seed of this process alone is returned: hashes then mean nothing after a restart,
    which costs only the comparison of old decision records.
    """
    path = state_dir / "seed"
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(), 16)
    seed = secrets.randbits(64)
    with contextlib.suppress(OSError):
        state_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{seed:016x}\n")
    return seed
