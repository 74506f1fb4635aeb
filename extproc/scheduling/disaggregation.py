"""Prefill on one endpoint and decode on another: whether, and on which.

Rules of this file:

- in a pool with ``prefill`` endpoints, a request whose decode endpoint lacks ``min_uncached_tokens`` or more of its
  prompt may be prefilled elsewhere. All in seconds:

      alone(d)  = (backlog(d) + work(d)) / rate(d) + standstill(d)
      pair(p,d) = (backlog(p) + work(p)) / rate(p) + standstill(p) + uncached(d) / transfer rate

  where ``work`` is what the uncached tokens are behind the cached ones (:mod:`extproc.fleet.prefill`);
- the prefill endpoint is the one where the prompt is computed soonest, whatever the decode endpoint;
- an endpoint of role ``decode`` then always takes the pair: it is there to be spared prompts, whose computing would hold
  up all its streams. One of role ``both`` takes it where ``pair`` is less than ``alone``;
- where the strategy's costs are seconds, the decode endpoint is chosen anew with ``pair`` in place of ``alone`` for those
  that take it; else it is the strategy's first choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from extproc.fleet.endpoint import Endpoint, Lifecycle, Role
from extproc.fleet.prefill import PRIOR_SHARE, work
from extproc.scheduling.strategy import Choice


@dataclass(slots=True, frozen=True)
class Prefiller:
    """Where a prompt is prefilled, and what of it is not cached there."""

    endpoint: Endpoint
    uncached_tokens: int


def prefillers(endpoints: Sequence[Endpoint], now: float, adapter: str = "") -> list[Endpoint]:
    """Endpoints of a pool that may be asked to prefill."""
    return [
        endpoint
        for endpoint in endpoints
        if endpoint.spec.role is Role.PREFILL
        and endpoint.lifecycle is Lifecycle.READY
        and not (endpoint.state is not None and endpoint.state.sleeping)
        and endpoint.health.admits(now, endpoint.leases)
        and (not adapter or endpoint.serves(adapter))
    ]


def choose(
    ranked: Sequence[Choice],
    candidates: Sequence[Endpoint],
    held: Mapping[int, int],
    prompt_tokens: int,
    now: float,
    *,
    min_uncached_tokens: int,
    transfer_rate: float,
    in_seconds: bool,
    attention: float = PRIOR_SHARE,
) -> tuple[list[Choice], Prefiller | None]:
    """Choices in the order in which to decode, and where to prefill; None: where it is decoded.

    ``held``: slot -> prompt tokens held. ``transfer_rate``: tokens per second whose KV cache reaches the decode endpoint.
    ``in_seconds``: the costs of ``ranked`` are seconds, and their order may change. ``attention``: its share of the work.
    """
    if not candidates or prompt_tokens < min_uncached_tokens:
        return list(ranked), None

    def seconds(endpoint: Endpoint, cached: int) -> float:
        rate = endpoint.rates.prefill_at(now)
        own = work(prompt_tokens - cached, cached, attention)
        return (endpoint.backlog.tokens(now, rate) + own) / rate + endpoint.standstill.seconds(now)

    prefill_s, best = min(
        ((seconds(one, held.get(one.slot, 0)), one) for one in candidates),
        key=lambda pair: (pair[0], pair[1].tick),
    )

    def saved(choice: Choice) -> float | None:
        """Seconds that the pair saves there, below 0 when it costs; None: it decodes alone."""
        uncached = prompt_tokens - choice.matched_tokens
        if uncached < min_uncached_tokens:
            return None
        less = seconds(choice.endpoint, choice.matched_tokens) - prefill_s - uncached / transfer_rate
        return less if less > 0.0 or choice.endpoint.spec.role is Role.DECODE else None

    order = list(ranked)
    if in_seconds:
        gains = [saved(choice) for choice in ranked]
        order = [
            choice if gain is None else replace(choice, cost=choice.cost - gain)
            for choice, gain in zip(ranked, gains, strict=True)
        ]
        order.sort(key=lambda choice: choice.cost)
    if saved(order[0]) is None:
        return order, None
    return order, Prefiller(best, prompt_tokens - held.get(best.slot, 0))
