"""Learned speeds of one endpoint. The prior is the pool's; samples refine it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rates:
    """``prefill`` in tokens per second."""

    prefill: float
