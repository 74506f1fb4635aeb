"""Weighted score: several scores between 0 and 1, each with a weight, added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from extproc.fleet.strangers import number
from extproc.scheduling.strategies.latency import ttft_s
from extproc.scheduling.strategies.least_requests import share
from extproc.scheduling.strategies.queue_depth import depth
from extproc.scheduling.strategy import Candidate, Choice, Query
from extproc.scheduling.ties import ranked

_Values = list[float | None]


def _cache(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    prompt = max(query.prompt_tokens, 1)
    return [min(candidate.matched_tokens / prompt, 1.0) for candidate in candidates]


def _load(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    return _lowest_best([share(candidate) for candidate in candidates])


def _queue(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    return _lowest_best([depth(candidate, now) + 1.0 for candidate in candidates])


def _kv(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    values: _Values = []
    for candidate in candidates:
        state = candidate.endpoint.state
        usage = number(state.kv_usage) if state is not None and candidate.endpoint.trust(now) > 0 else None
        values.append(None if usage is None or usage > 1.0 else 1.0 - usage)
    return values


def _latency(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    return _lowest_best([ttft_s(candidate, now) for candidate in candidates])


def _success(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    return [candidate.endpoint.stats.five_minutes.success(now) for candidate in candidates]


def _locality(query: Query, candidates: Sequence[Candidate], now: float) -> _Values:
    return [float(candidate.endpoint.spec.locality == query.locality != "") for candidate in candidates]


SCORES: dict[str, Callable[[Query, Sequence[Candidate], float], _Values]] = {
    "cache": _cache,
    "load": _load,
    "queue": _queue,
    "kv": _kv,
    "latency": _latency,
    "success": _success,
    "locality": _locality,
}
DEFAULT_WEIGHTS = {"cache": 0.3, "load": 0.7}


class WeightedScore:
    """``cost = 1 - sum(weight * score) / sum(weights)``. Scores: cache (share of the prompt held), load
    (leases per weight, lowest over own), queue (same, of waiting requests), kv (free share), latency (lowest
    TTFT over own), success, locality. An unknown score counts as the mean of the known ones."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or DEFAULT_WEIGHTS)
        unknown = ", ".join(sorted(set(self._weights) - set(SCORES)))
        if unknown:
            raise ValueError(
                f"strategy weighted-score has no score {unknown}; there are {', '.join(sorted(SCORES))}"
            )
        if not any(weight > 0 for weight in self._weights.values()):
            raise ValueError("strategy weighted-score needs a weight above 0")

    @property
    def terms(self) -> tuple[str, ...]:
        """The scores in use."""
        return tuple(self._weights)

    def rank(self, query: Query, candidates: Sequence[Candidate], now: float) -> list[Choice]:
        """Highest weighted mean of the scores first."""
        columns = [_filled(SCORES[name](query, candidates, now)) for name in self._weights]
        weights = list(self._weights.values())
        total = sum(weights)
        rows = list(zip(*columns, strict=True))
        costs = [
            1.0 - sum(weight * score for weight, score in zip(weights, row, strict=True)) / total
            for row in rows
        ]
        return ranked(candidates, costs, rows)


def _lowest_best(values: Sequence[float | None]) -> _Values:
    known = [value for value in values if value is not None and value < float("inf")]
    lowest = min(known, default=0.0)
    return [None if value is None else (lowest / value if value > 0.0 else 1.0) for value in values]


def _filled(values: _Values) -> list[float]:
    known = [value for value in values if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    return [mean if value is None else value for value in values]
