"""Which metrics and labels a PromQL expression uses, and which the gateway has: for tests of dashboard, alerts and pages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from extproc.fleet.fleet import Fleet
from extproc.telemetry.metrics import Metrics, catalogue

_NAME = re.compile(r"\b(extproc_[a-z0-9_]+)(\{[^}]*\})?")
_LABEL = re.compile(r"([a-z_]+) ?(?:=~|!~|!=|=)")
_PROCESS = frozenset(
    f"extproc_process_{name}"
    for name in (
        "cpu_seconds_total",
        "resident_memory_bytes",
        "virtual_memory_bytes",
        "start_time_seconds",
        "open_fds",
        "max_fds",
    )
)
_TARGET = frozenset({"job", "instance"})
"""Labels that Prometheus adds."""


@dataclass(slots=True, frozen=True)
class Used:
    """One metric in an expression, with the labels that its selector names."""

    name: str
    labels: frozenset[str]


def known() -> dict[str, frozenset[str]]:
    """Every series name of the gateway -> its labels."""
    found: dict[str, frozenset[str]] = dict.fromkeys(_PROCESS, frozenset())
    for name, kind, labels, _ in catalogue(Metrics(Fleet().endpoints, lambda: 0.0, process=False)):
        if kind == "histogram":
            found |= {f"{name}_{part}": frozenset(labels) for part in ("sum", "count")}
            found[f"{name}_bucket"] = frozenset({*labels, "le"})
        else:
            found[name] = frozenset(labels)
    return found


def used(expression: str) -> list[Used]:
    """What an expression (or a page of text) uses."""
    return [Used(name, frozenset(_LABEL.findall(labels))) for name, labels in _NAME.findall(expression)]


def mistakes(expression: str) -> list[str]:
    """Metrics that do not exist, and labels that they do not have."""
    catalogued = known()
    found = []
    for use in used(expression):
        labels = catalogued.get(use.name)
        if labels is None:
            found.append(f"there is no metric {use.name}")
        else:
            found += [f"{use.name} has no label {label}" for label in sorted(use.labels - labels - _TARGET)]
    return found
