"""Budgets of the day, learnt sizes and speeds, in a file of ``state_dir``. One that cannot be read costs what it knew."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from extproc.core import Core

log = logging.getLogger(__name__)


def save_state(path: Path, state: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Replace the file in one step unless nothing changed since ``saved``; returns what is in the file now."""
    if state == saved:
        return saved
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(state))
        os.replace(temporary, path)
    except OSError as error:
        log.warning("limits not written", extra={"file": str(path), "reason": error.strerror})
        return saved
    return state


def load_state(path: Path, core: Core) -> None:
    """Give the core what the file knows."""
    try:
        state = json.loads(path.read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        log.warning("limits of an earlier run not read", extra={"file": str(path), "reason": str(error)})
        return
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        days = {str(key): (int(day), float(used)) for key, (day, used) in state["days"].items()}
        core.admission.limiter.restore_days(days)
        replies = [
            (str(model), bool(stream), [float(size), float(tokens), float(count)])
            for model, stream, (size, tokens, count) in state["replies"]
            if size > 0 and tokens > 0
        ]
        core.admission.sizes.restore(replies)
        core.models.restore(
            {
                str(name): (float(size), float(tokens), int(prompts), int(answers))
                for name, (size, tokens, prompts, answers) in state["models"].items()
            }
        )
        core.restore_speeds(
            {str(name): (float(rate), float(share)) for name, (rate, share) in state["speeds"].items()}
        )
