"""Shadow traffic: which requests are copied to another pool, and how the copies did beside their originals.

Rules of this file:

- a client's session is copied as a whole (by its hash): the shadow pool's caches see what real ones would;
- budgets: copies at once, and copies a minute (a bucket of a second's worth, filled evenly). Beyond them nothing is copied;
- a copy is known by its original's id and ``SUFFIX``, which Envoy's shadow listener appends. A copy that was not ordered
  here, or comes twice, gets no endpoint: nobody but the gateway itself can send traffic there;
- copy and original are compared when both have ended well. A copy that never arrives, or never ends, is given up after its
  longest duration and ``GRACE_S``.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from extproc.ledger import Settlement
from extproc.outcome import Outcome

SUFFIX = "-shadow"
GRACE_S = 30.0
_KEPT = 2000
"""Pairs kept for the comparison, a pool."""


@dataclass(slots=True, frozen=True)
class ShadowPlan:
    """Copies of ``share`` (0 to 1) of the sessions of ``pool`` go to ``target``."""

    pool: str
    target: str
    share: float
    max_concurrent: int = 8
    rpm: int = 600
    max_duration_s: float = 120.0
    model: str = ""
    """Model name for the copy's body; empty: the first of the target's models."""


@dataclass(slots=True, frozen=True)
class Measured:
    """How one request went. Seconds; None where it was not measured."""

    failed: bool
    ttft_s: float | None
    duration_s: float | None
    output_tokens: int | None
    reason: str


@dataclass(slots=True)
class _Pair:
    plan: ShadowPlan
    ordered_at: float
    arrived: bool = False
    original: Measured | None = None
    copy: Measured | None = None


@dataclass(slots=True)
class _Side:
    """One pool's shadow."""

    plan: ShadowPlan
    tokens: float
    filled_at: float
    running: int = 0
    ordered: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Why sessions that are to be copied were not: concurrent, rpm."""
    lost: int = 0
    compared: int = 0
    pairs: deque[tuple[Measured, Measured]] = field(default_factory=lambda: deque(maxlen=_KEPT))


class Shadows:
    """See the rules above. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sides: dict[str, _Side] = {}
        self._pairs: dict[str, _Pair] = {}
        """By the original's id; bounded by the sum of ``max_concurrent`` and what has not been compared yet."""

    def install(self, plans: Iterable[ShadowPlan], now: float) -> None:
        """Take over a configuration; comparisons go on where pool and target stay."""
        wanted: dict[str, _Side] = {}
        for plan in plans:
            side = self._sides.get(plan.pool)
            if side is None or side.plan.target != plan.target:
                side = _Side(plan, _burst(plan), now)
            side.plan = plan
            wanted[plan.pool] = side
        self._sides = wanted

    def order(self, pool: str, request_id: str, key: str, now: float) -> bool:
        """Whether this request is to be copied; ``key`` is its session, or its own id."""
        side = self._sides.get(pool)
        if side is None:
            return False
        plan = side.plan
        if float(xxhash.xxh3_64_intdigest(f"shadow\0{pool}\0{key}".encode())) / 2.0**64 >= plan.share:
            return False
        side.tokens = min(side.tokens + (now - side.filled_at) * plan.rpm / 60.0, _burst(plan))
        side.filled_at = now
        if side.running >= plan.max_concurrent:
            return _skip(side, "concurrent")
        if side.tokens < 1.0:
            return _skip(side, "rpm")
        side.tokens -= 1.0
        side.running += 1
        side.ordered += 1
        self._pairs[request_id] = _Pair(plan, now)
        return True

    def arrived(self, copy_id: str) -> ShadowPlan | None:
        """A copy has come to be decided: its plan, once; None for anything not ordered."""
        pair = self._pairs.get(copy_id.removesuffix(SUFFIX)) if copy_id.endswith(SUFFIX) else None
        if pair is None or pair.arrived:
            return None
        pair.arrived = True
        return pair.plan

    def refused(self, copy_id: str, reason: str) -> None:
        """The copy got no endpoint."""
        pair = self._pairs.get(copy_id.removesuffix(SUFFIX))
        if pair is not None and pair.copy is None:
            self._copy_ended(copy_id.removesuffix(SUFFIX), pair, Measured(True, None, None, None, reason))

    def settled(self, settlement: Settlement) -> None:
        """A request ended, original, copy or neither."""
        request_id = settlement.lease.id
        original_id = request_id.removesuffix(SUFFIX)
        pair = self._pairs.get(original_id)
        if pair is None:
            return
        if original_id != request_id:
            if pair.copy is None:
                self._copy_ended(original_id, pair, _measured(settlement))
        elif pair.original is None:
            pair.original = _measured(settlement)
            self._compare(original_id, pair)

    def tick(self, now: float) -> None:
        """Once a second or so: give up what never ended."""
        for request_id, pair in list(self._pairs.items()):
            if now - pair.ordered_at <= pair.plan.max_duration_s + GRACE_S:
                continue
            side = self._sides.get(pair.plan.pool)
            if pair.copy is None and side is not None:
                side.running = max(side.running - 1, 0)
                side.lost += 1
            if pair.copy is None or now - pair.ordered_at > 3600.0:
                del self._pairs[request_id]

    def report(self) -> list[dict[str, object]]:
        """Both sides by side, by pool."""
        return [_row(side) for _, side in sorted(self._sides.items())]

    def totals(self) -> dict[str, dict[str, int]]:
        """Pool -> running totals: copied, compared, lost, and why others were not copied."""
        return {
            pool: {"copied": side.ordered, "compared": side.compared, "lost": side.lost, **side.skipped}
            for pool, side in dict(self._sides).items()
        }

    def _copy_ended(self, original_id: str, pair: _Pair, measured: Measured) -> None:
        pair.copy = measured
        side = self._sides.get(pair.plan.pool)
        if side is not None:
            side.running = max(side.running - 1, 0)
        self._compare(original_id, pair)

    def _compare(self, original_id: str, pair: _Pair) -> None:
        if pair.original is None or pair.copy is None:
            return
        del self._pairs[original_id]
        side = self._sides.get(pair.plan.pool)
        if side is not None and side.plan.target == pair.plan.target:
            side.compared += 1
            side.pairs.append((pair.original, pair.copy))


def _burst(plan: ShadowPlan) -> float:
    return max(plan.rpm / 60.0, 1.0)


def _skip(side: _Side, why: str) -> bool:
    side.skipped[why] = side.skipped.get(why, 0) + 1
    return False


def _measured(settlement: Settlement) -> Measured:
    end = settlement.end
    usage = end.usage if end is not None else None
    return Measured(
        settlement.outcome is Outcome.FAILURE or settlement.lease.blamed is not None,
        end.ttft_s if end is not None and settlement.lease.stream else None,
        end.engine_s if end is not None else None,
        usage.output if usage is not None else None,
        settlement.reason,
    )


def _row(side: _Side) -> dict[str, object]:
    originals = [original for original, _ in side.pairs]
    copies = [copy for _, copy in side.pairs]
    both = [(o, c) for o, c in side.pairs if o.reason == "ok" and c.reason == "ok"]
    return {
        "pool": side.plan.pool,
        "target": side.plan.target,
        "share": side.plan.share,
        "running": side.running,
        "copied": side.ordered,
        "skipped": dict(side.skipped),
        "lost": side.lost,
        "pairs": len(side.pairs),
        "compared": len(both),
        "original": _numbers(originals, [o for o, _ in both]),
        "copy": _numbers(copies, [c for _, c in both]),
        "ratio": {
            "ttft": _median_ratio([(o.ttft_s, c.ttft_s) for o, c in both]),
            "duration": _median_ratio([(o.duration_s, c.duration_s) for o, c in both]),
            "output_tokens": _median_ratio([(o.output_tokens, c.output_tokens) for o, c in both]),
        },
    }


def _numbers(every: list[Measured], fine: list[Measured]) -> Mapping[str, object]:
    """Errors of all; the rest of pairs in which both went well."""
    return {
        "errors": sum(one.failed for one in every),
        "ttft_s": _quantiles([one.ttft_s for one in fine]),
        "duration_s": _quantiles([one.duration_s for one in fine]),
        "output_tokens": _quantiles([one.output_tokens for one in fine]),
    }


def _quantiles(values: list[float | None] | list[int | None]) -> Mapping[str, float] | None:
    known = sorted(float(value) for value in values if value is not None)
    if not known:
        return None
    return {"p50": statistics.median(known), "p99": known[min(int(0.99 * len(known)), len(known) - 1)]}


def _median_ratio(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """Median over the pairs of copy / original."""
    ratios = [copy / original for original, copy in pairs if original and copy is not None]
    return statistics.median(ratios) if ratios else None
