"""What the gateway must know of an inference engine's dialect beside the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from extproc.engines.state import EngineState


@dataclass(slots=True, frozen=True)
class Engine:
    """One kind of engine. ``read`` turns a metrics page into a state; what the page does not say is None,
    never zero.
    """

    name: str
    read: Callable[[str, float], EngineState]
    """(page text, monotonic seconds of the scrape) -> state. Never raises, whatever the page holds."""
    tells: frozenset[str] = frozenset()
    """Fields of EngineState that a page of a supported version has. One that is None is worth a warning."""
    metrics_path: str | None = "/metrics"
    """None: this engine has no metrics page and is not scraped."""
    metrics_port: int | None = None
    """Where metrics are served when not on the port that takes requests."""
    health_path: str = "/health"
    keep_alive_s: float | None = 5.0
    """Seconds after which the engine closes idle connections, None when it does not. Envoy's must be
    shorter.
    """

    def missing(self, state: EngineState) -> list[str]:
        """Names of expected fields that ``state`` lacks, sorted."""
        return sorted(field for field in self.tells if getattr(state, field) is None)
