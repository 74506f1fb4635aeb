"""How equals are told apart: fewest leases first, then the endpoint chosen longest ago (rotation)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from extproc.scheduling.strategy import Candidate, Choice


def order(choice: Choice) -> tuple[float, int, int]:
    """Sort key of a choice: cost, leases, rotation."""
    endpoint = choice.endpoint
    return (choice.cost, endpoint.leases, endpoint.tick)


def ranked(
    candidates: Sequence[Candidate], costs: Iterable[float], terms: Iterable[tuple[float, ...]] | None = None
) -> list[Choice]:
    """Choices with these costs, best first, equals in order. ``terms`` default to the cost alone."""
    if terms is None:
        choices = [
            Choice(c.endpoint, cost, (cost,), c.matched_tokens)
            for c, cost in zip(candidates, costs, strict=True)
        ]
    else:
        choices = [
            Choice(c.endpoint, cost, values, c.matched_tokens)
            for c, cost, values in zip(candidates, costs, terms, strict=True)
        ]
    choices.sort(key=order)
    return choices
