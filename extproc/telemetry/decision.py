"""The decision record: why a request went where it went, and what became of it.

Rules of this file:

- a record never refers to the request: no prompt text, no body, only lengths and block hashes (seeded, see
  ``kvcache.hashing``);
- making one must cost next to nothing: it keeps references to what the strategy returned and copies only what
  will have changed by the time someone looks (leases); :func:`render` does the work for who asks;
- endpoints beyond ``MAX_LISTED`` are counted, not kept: a fleet of a thousand would make each record a
  megabyte.

The rendered form is described by ``protos/decision.proto``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extproc.admission.dispatcher import Considered
from extproc.api.request import InferenceRequest
from extproc.fleet.endpoint import Endpoint
from extproc.ledger import Settlement
from extproc.outcome import End, Outcome
from extproc.routing.rejection import Rejection
from extproc.scheduling.strategy import Choice

MAX_LISTED = 32
MAX_BLOCKS = 32
_MARKS = ((4, 128), (16, 512), (64, 1 << 30))
"""Blocks behind the first :data:`MAX_BLOCKS`: every so many, up to a depth. A hash stands for all before it, so these tell
to a quarter of its length how much two long prompts share."""


@dataclass(slots=True)
class Ending:
    """How the request ended; ``end`` is None when no final record came. Never changed."""

    outcome: Outcome
    reason: str
    endpoint: Endpoint
    attempts: int
    end: End | None


@dataclass(slots=True)
class DecisionRecord:
    """One decision. ``at`` is Unix time in seconds; tokens are estimates; costs are in the strategy's
    unit.
    """

    id: str
    at: float
    api: str = ""
    model: str = ""
    stream: bool = False
    pool: str = ""
    route: str = ""
    version: str = ""
    tenant: str = ""
    strategy: str = ""
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    """Leading prompt tokens that the chosen endpoint holds."""
    media: int = 0
    blocks: Sequence[int] = ()
    """Hashes of the first prompt blocks."""
    marks: Sequence[int] = ()
    """Hashes at :func:`mark_depths`."""
    adapter: str = ""
    terms: Sequence[str] = ()
    ranked: Sequence[Choice] = ()
    leases: Sequence[int] = ()
    """Open leases of the ranked endpoints at the decision."""
    considered: int = 0
    removed: Sequence[tuple[Endpoint, str]] = ()
    removed_count: int = 0
    fallbacks: Sequence[Endpoint] = ()
    rejection: Rejection | None = None
    took_us: float = 0.0
    ending: Ending | None = None
    """None while the request runs."""

    @property
    def chosen(self) -> str:
        """Key of the endpoint chosen; empty for a rejection."""
        return self.ranked[0].endpoint.key if self.ranked and self.rejection is None else ""

    def settled(self, settlement: Settlement) -> None:
        """The request ended. The lease is not kept: it holds every block hash of the prompt."""
        lease = settlement.lease
        self.ending = Ending(
            settlement.outcome, settlement.reason, lease.endpoint, lease.attempts, settlement.end
        )


def mark_depths(blocks: int) -> Iterator[int]:
    """Depths at which a prompt of so many blocks is marked."""
    depth = MAX_BLOCKS
    for step, end in _MARKS:
        while depth < end:
            depth += step
            if depth > blocks:
                return
            yield depth


def record_of(considered: Considered, at: float, took_us: float) -> DecisionRecord:
    """The record of what the dispatcher looked at, taken before its lease is opened. ``at`` is Unix time."""
    request, query, decision = considered.request, considered.query, considered.decision
    ranked, removed = considered.ranked, considered.removed
    record = DecisionRecord(
        request.id,
        at,
        api=request.api.value,
        model=query.model,
        stream=request.stream,
        pool=considered.match.pool.name,
        route=considered.match.route.name,
        tenant=considered.tenant.name,
        strategy=considered.strategy,
        adapter=query.adapter,
        prompt_bytes=request.prompt.size,
        prompt_tokens=query.prompt_tokens,
        media=request.prompt.media,
        terms=considered.terms,
        ranked=ranked[:MAX_LISTED],
        leases=[choice.endpoint.leases for choice in ranked[:MAX_LISTED]],
        considered=len(ranked),
        removed=removed[:MAX_LISTED],
        removed_count=len(removed),
        rejection=considered.rejection,
        took_us=took_us,
    )
    if decision is not None:
        lease = decision.lease
        record.version = lease.version
        record.matched_tokens = decision.choices[0].matched_tokens
        record.fallbacks = lease.fallbacks
        if lease.look is not None:
            hashes = lease.look.hashes
            record.blocks = hashes[:MAX_BLOCKS]
            if len(hashes) > MAX_BLOCKS:
                record.marks = [hashes[depth - 1] for depth in mark_depths(len(hashes))]
    return record


def record_of_rejection(
    request: InferenceRequest, rejection: Rejection, at: float, tenant: str = ""
) -> DecisionRecord:
    """The record of a request that was refused before any endpoint was looked at."""
    return DecisionRecord(
        request.id,
        at,
        api=request.api.value,
        model=(request.model or "")[:200],
        stream=request.stream,
        prompt_bytes=request.prompt.size,
        tenant=tenant,
        media=request.prompt.media,
        rejection=rejection,
    )


def reason_of(ranked: Sequence[Choice]) -> str:
    """Why the first was first, in one word for metrics.

    ``only_one`` there was no choice; ``prefix`` it holds the longest part of the prompt; ``spill`` another
    holds more but was not worth waiting for; ``load`` nobody holds anything.
    """
    if len(ranked) == 1:
        return "only_one"
    longest = max(choice.matched_tokens for choice in ranked)
    if not longest:
        return "load"
    return "prefix" if ranked[0].matched_tokens == longest else "spill"


def render(record: DecisionRecord) -> dict[str, object]:
    """The record as plain values, ready for JSON."""
    return {
        "id": record.id,
        "at": record.at,
        "api": record.api,
        "model": record.model,
        "stream": record.stream,
        "pool": record.pool,
        "route": record.route,
        "version": record.version,
        "tenant": record.tenant,
        "strategy": record.strategy,
        "prompt_bytes": record.prompt_bytes,
        "prompt_tokens": record.prompt_tokens,
        "matched_tokens": record.matched_tokens,
        "media": record.media,
        "blocks": [f"{block:016x}" for block in record.blocks],
        "terms": list(record.terms),
        "candidates": [
            {
                "endpoint": choice.endpoint.key,
                "cost": choice.cost,
                "terms": list(choice.terms),
                "matched_tokens": choice.matched_tokens,
                "leases": leases,
            }
            for choice, leases in zip(record.ranked, record.leases, strict=True)
        ],
        "candidates_total": record.considered,
        "removed": [{"endpoint": endpoint.key, "reason": reason} for endpoint, reason in record.removed],
        "removed_total": record.removed_count,
        "chosen": record.chosen,
        "fallbacks": [endpoint.key for endpoint in record.fallbacks],
        "rejection": _rejection(record.rejection),
        "took_us": record.took_us,
        "outcome": _outcome(record.ending),
        "adapter": record.adapter,
        "marks": [
            {"depth": depth, "hash": f"{block:016x}"}
            for depth, block in zip(mark_depths(1 << 20), record.marks, strict=False)
        ],
    }


def _rejection(rejection: Rejection | None) -> dict[str, object] | None:
    if rejection is None:
        return None
    return {
        "status": rejection.status,
        "code": rejection.code,
        "reason": rejection.reason,
        "message": rejection.message,
        "retry_after_s": rejection.retry_after_s,
    }


def _outcome(ending: Ending | None) -> dict[str, object] | None:
    if ending is None:
        return None
    end = ending.end
    usage = end.usage if end is not None else None
    return {
        "outcome": ending.outcome.value,
        "reason": ending.reason,
        "endpoint": ending.endpoint.key,
        "attempts": ending.attempts,
        "status": end.status if end is not None else None,
        "flags": list(end.flags) if end is not None else [],
        "details": end.details if end is not None else "",
        "waiting_s": end.waiting_s if end is not None else None,
        "ttft_s": end.ttft_s if end is not None else None,
        "engine_s": end.engine_s if end is not None else None,
        "duration_s": end.duration_s if end is not None else None,
        "response_bytes": end.response_bytes if end is not None else None,
        "input_tokens": usage.input if usage is not None else None,
        "output_tokens": usage.output if usage is not None else None,
        "cached_tokens": usage.cached if usage is not None else None,
    }
