"""What admission is told by a configuration, and what it asks of a shared store of limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.admission.policy import Policy
from extproc.limits.limit import LimitRules, Scopes


@dataclass(slots=True, frozen=True)
class AdmissionRules:
    """What one configuration (and the schedules that hold now) says."""

    policies: Mapping[str, Policy] = field(default_factory=dict)
    """Pool -> policy; a pool that is not here has the defaults."""
    limits: LimitRules = field(default_factory=LimitRules)
    highest: int | None = None
    """The highest priority of any tenant; None where all have the same."""


@dataclass(slots=True, frozen=True)
class Demand:
    """What a shared store of limits is asked for."""

    scopes: Scopes
    tokens: float
