"""Endpoints and queries for tests of strategies."""

from __future__ import annotations

from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.scheduling.strategy import Candidate, Query, Strategy


def endpoint(slot: int, *, leases: int = 0, **spec: object) -> Endpoint:
    """A replica named by a letter."""
    made = Endpoint(EndpointSpec(chr(ord("a") + slot), "10.0.0.1:8000", "pool", **spec), slot)  # type: ignore[arg-type]
    made.leases = leases
    return made


def fleet(count: int, **spec: object) -> list[Endpoint]:
    """Equal idle replicas."""
    return [endpoint(slot, **spec) for slot in range(count)]


def scraped(target: Endpoint, at: float = 0.0, **values: object) -> Endpoint:
    """Two equal scrapes, so that gauges are believed."""
    for when in (at - 0.5, at):
        target.observe(EngineState(at=when, **values), target.state, when)  # type: ignore[arg-type]
    return target


def query(prompt: int = 1000, output: int = 200, **more: object) -> Query:
    """A request by its tokens."""
    return Query("id", "llama", prompt_tokens=prompt, output_tokens=output, stream=True, **more)  # type: ignore[arg-type]


def order(
    strategy: Strategy,
    endpoints: list[Endpoint],
    asked: Query | None = None,
    matched: dict[int, int] | None = None,
    now: float = 0.0,
) -> str:
    """Names of the endpoints, best first."""
    candidates = [Candidate(each, (matched or {}).get(each.slot, 0)) for each in endpoints]
    return "".join(
        choice.endpoint.spec.cluster for choice in strategy.rank(asked or query(), candidates, now)
    )


def choose(
    strategy: Strategy, endpoints: list[Endpoint], asked: Query, tick: int, now: float = 0.0
) -> Endpoint:
    """One decision without a cache, with the lease opened and the rotation mark set."""
    best = strategy.rank(asked, [Candidate(each) for each in endpoints], now)[0].endpoint
    best.leases += 1
    best.tick = tick
    return best
