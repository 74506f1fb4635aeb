"""A Prometheus histogram with vLLM's buckets."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_E2E_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound; the last one is +Inf's."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Start at zero."""
        self.counts = [0] * (len(self.bounds) + 1)

    @classmethod
    def of_ttft(cls) -> Histogram:
        """With the bounds of vllm:time_to_first_token_seconds."""
        return cls(_TTFT_S)

    @classmethod
    def of_e2e(cls) -> Histogram:
        """With the bounds of vllm:e2e_request_latency_seconds."""
        return cls(_E2E_S)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        """The exposition's samples."""
        lines = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            lines.append(f'{name}_bucket{{le="{bound}",{labels}}} {float(running)}')
        lines.append(f"{name}_count{{{labels}}} {float(running)}")
        lines.append(f"{name}_sum{{{labels}}} {self.total}")
        return lines
