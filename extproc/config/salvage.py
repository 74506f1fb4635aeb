"""What can still be checked of an ``extproc.yaml`` with faults: its references, without the parts that are wrong.

Rules of this file:

- what is wrong is cut out, as little as makes the rest valid: a value, else the mapping around it; a list ends before
  its wrong item, so that lines still count right;
- whoever refers to what was cut (or to a section whose name is misspelt) is not blamed for it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from extproc.config.envoy_message import did_you_mean
from extproc.config.problem import Problem
from extproc.config.schema import Settings
from extproc.config.yaml_source import Document, NodePath

_ROUNDS = 50
_NOUNS = {"pools": "pool", "routes": "route", "tiers": "tier", "tenants": "tenant", "schedules": "schedule"}
"""Sections that others refer to, and how messages call their entries."""


@dataclass(slots=True, frozen=True)
class Salvage:
    """Settings without the faulty parts."""

    settings: Settings
    names: frozenset[str]
    """Entries that were cut."""
    nouns: frozenset[str]
    """Kinds of entries of which some may be missing."""

    def sure(self, problem: Problem) -> bool:
        """Whether a problem of these settings is one of the whole file too."""
        return problem.fatal and not (
            any(f"`{name}`" in problem.message for name in self.names)
            or any(f"{noun} `" in problem.message for noun in self.nouns)
        )


def salvage(document: Document, folder: Path) -> Salvage | None:
    """The valid part of ``document``; None where there is none. ``folder``: as for the settings themselves."""
    data = copy.deepcopy(document.data)
    names: set[str] = set()
    nouns: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            settings = Settings.model_validate(data, context={"folder": folder})
            return Salvage(settings, frozenset(names), frozenset(nouns))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = tuple(step for step in detail["loc"] if step != "[key]")
                if detail["type"] == "missing":
                    path = path[:-1]
                if detail["type"] == "extra_forbidden" and len(path) == 1:
                    nouns |= {
                        noun for section, noun in _NOUNS.items() if did_you_mean(str(path[0]), [section])
                    }
                if not path:
                    return None
                _cut(data, path, names, nouns)
    return None


def _cut(data: Any, path: NodePath, names: set[str], nouns: set[str]) -> None:
    """Take out what stands at ``path``, or the nearest thing above that is there."""
    steps: list[str | int] = []
    here, above = data, None
    for step in path:
        try:
            here, above = here[step], here
        except (KeyError, IndexError, TypeError):
            break
        steps.append(step)
    if above is None:
        return
    section = str(steps[0])
    if section in _NOUNS and len(steps) == 1:
        nouns.add(_NOUNS[section])
    last = steps[-1]
    if isinstance(above, list):
        if section in _NOUNS and len(steps) == 2:
            gone = above[int(last) :]
            names |= {str(item.get("name")) for item in gone if isinstance(item, dict)}
        del above[int(last) :]
    else:
        if section in _NOUNS and len(steps) == 2:
            names.add(str(last))
        del above[last]
