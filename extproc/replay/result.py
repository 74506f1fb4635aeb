"""What a run gave, request by request, and the numbers that sum it up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from extproc.replay.setup import Slo


@dataclass(slots=True, frozen=True)
class Served:
    """One request as its client saw it. Times in seconds from its arrival; None where that point was never
    reached."""

    id: str
    at: float
    engine: int
    """Number of the engine that served it last; -1: none."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    e2e_s: float | None
    status: int

    @property
    def ok(self) -> bool:
        """Whether the client got its whole answer."""
        return self.status == 200

    def meets(self, slo: Slo) -> bool:
        """Whether it was served well."""
        if not self.ok or self.ttft_s is None or self.e2e_s is None or self.ttft_s > slo.ttft_s:
            return False
        return self.e2e_s - self.ttft_s <= slo.tpot_s * max(self.output_tokens - 1, 0) + 1e-9


@dataclass
class Run:
    """One trace under one policy."""

    policy: str
    served: Sequence[Served]
    seconds: float
    """From the start of the trace to the end of the last request."""
    slo: Slo
    requests_per_engine: Sequence[int]
    in_flight_s: Sequence[float]
    """Requests in flight integrated over time, for each engine."""
    samples: Sequence[tuple[float, Sequence[int]]]
    """(time, requests in flight for each engine), at equal steps."""
    preemptions: int = 0
    explained: Mapping[str, object] | None = None
    trace: str = ""
    seed: int = 0

    @cached_property
    def ttfts(self) -> list[float]:
        """Of the requests that got one, sorted."""
        return sorted(row.ttft_s for row in self.served if row.ok and row.ttft_s is not None)

    @cached_property
    def e2es(self) -> list[float]:
        """Of the requests that succeeded, sorted."""
        return sorted(row.e2e_s for row in self.served if row.ok and row.e2e_s is not None)

    @cached_property
    def hit_ratio(self) -> float:
        """Cached over all prompt tokens of the requests that succeeded."""
        prompt = sum(row.prompt_tokens for row in self.served if row.ok)
        return sum(row.cached_tokens for row in self.served if row.ok) / prompt if prompt else 0.0

    def attained(self, slo: Slo | None = None) -> float:
        """Share of all requests that were served well."""
        wanted = slo or self.slo
        return sum(row.meets(wanted) for row in self.served) / len(self.served) if self.served else 0.0

    @property
    def max_over_mean_load(self) -> float:
        """The busiest engine's mean number of requests in flight over that of all."""
        total = sum(self.in_flight_s)
        return max(self.in_flight_s) * len(self.in_flight_s) / total if total else 1.0

    def summary(self) -> dict[str, object]:
        """The run in numbers, ready for JSON."""
        done = [row for row in self.served if row.ok]
        tpots = sorted(
            (row.e2e_s - row.ttft_s) / (row.output_tokens - 1)
            for row in done
            if row.output_tokens > 1 and row.e2e_s is not None and row.ttft_s is not None
        )
        span = max((row.at for row in self.served), default=0.0)
        attained = self.attained()
        return {
            "trace": self.trace,
            "policy": self.policy,
            "engines": len(self.requests_per_engine),
            "requests": len(self.served),
            "failed": len(self.served) - len(done),
            "seed": self.seed,
            "hit_ratio": round(self.hit_ratio, 5),
            "ttft_mean_s": _round(sum(self.ttfts) / len(self.ttfts) if self.ttfts else None),
            "ttft_p50_s": _round(quantile(self.ttfts, 0.5)),
            "ttft_p90_s": _round(quantile(self.ttfts, 0.9)),
            "ttft_p99_s": _round(quantile(self.ttfts, 0.99)),
            "tpot_p50_s": _round(quantile(tpots, 0.5)),
            "tpot_p90_s": _round(quantile(tpots, 0.9)),
            "e2e_p50_s": _round(quantile(self.e2es, 0.5)),
            "e2e_p90_s": _round(quantile(self.e2es, 0.9)),
            "e2e_p99_s": _round(quantile(self.e2es, 0.99)),
            "goodput": _round(attained * len(self.served) / span if span else None),
            "slo_attained": round(attained, 5),
            "max_over_mean_load": _round(self.max_over_mean_load),
            "preemptions": self.preemptions,
            "seconds": _round(self.seconds),
            "requests_per_engine": list(self.requests_per_engine),
        }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of a sorted sequence lies (nearest rank); None of nothing."""
    if not ordered:
        return None
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)]


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
