"""A declared route: match -> pool and policy. The first route that matches wins; a pool's models are its implicit routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.api.request import InferenceRequest
from extproc.routing.guard import Guard


@dataclass(slots=True, frozen=True)
class RouteMatch:
    """Conditions that must all hold; an empty match holds for every request."""

    models: frozenset[str] = frozenset()
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case header name -> exact value."""
    path_prefix: str = ""

    def holds(self, request: InferenceRequest) -> bool:
        """Whether the request meets every condition."""
        if self.models and request.model not in self.models:
            return False
        if self.path_prefix and not request.head.path.startswith(self.path_prefix):
            return False
        headers = request.head.headers
        return all(headers.get(name) == value for name, value in self.headers.items())


@dataclass(slots=True, frozen=True)
class Route:
    """What a matched request gets: a pool, and policy that overrides the pool's."""

    name: str
    match: RouteMatch
    pool: str
    strategy: str | None = None
    strategy_options: Mapping[str, object] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Version -> share; empty means all versions alike."""
    model: str | None = None
    """Model name to splice into the body for this route, if any."""
    guard: Guard | None = None
    """Bounds on streamed replies."""
    pin: bool = False
    """An explicit session stays on its endpoint as long as that can take requests."""
