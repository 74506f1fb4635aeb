"""How equals are told apart: fewest leases first, then the endpoint chosen longest ago (rotation)."""

from __future__ import annotations

from extproc.scheduling.strategy import Choice


def order(choice: Choice) -> tuple[float, int, int]:
    """Sort key of a choice: cost, leases, rotation."""
    endpoint = choice.endpoint
    return (choice.cost, endpoint.leases, endpoint.tick)
