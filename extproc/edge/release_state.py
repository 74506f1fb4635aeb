"""The file in which releases survive a restart: written whole, by renaming, readable by us alone."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


class ReleaseState:
    """``releases.json`` in the state folder. Errors are logged: a release that is not remembered begins anew, with nobody
    on the candidate."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "releases.json"

    def read(self) -> Mapping[str, object]:
        """What was written last; nothing when there is nothing to read."""
        try:
            saved = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.error("releases of the last run cannot be read", extra={"reason": str(error)})
            return {}
        return saved if isinstance(saved, dict) else {}

    def write(self, state: Mapping[str, object]) -> None:
        """Replace the file. Blocking: call it in a thread."""
        temporary = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(state).encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            log.error("releases cannot be saved", extra={"reason": str(error)})
