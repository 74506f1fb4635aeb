"""``extproc check --explain``: the values that hold, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from extproc.admission.policy import DEFAULT_PRESET
from extproc.config import traffic
from extproc.config.schema.base import show_bytes, show_seconds
from extproc.config.snapshot import Snapshot
from extproc.limits.limit import Limit
from extproc.routing.pool import Pool
from extproc.routing.route import Route


def explain(snapshot: Snapshot) -> Iterator[str]:
    """Lines for people: admission of every pool, routes in their order, tenants, limits, schedules."""
    settings = snapshot.settings
    for name in snapshot.pools:
        own = settings.pools[name].admission if name in settings.pools else None
        preset = (own.preset if own is not None else None) or settings.admission.preset or DEFAULT_PRESET
        yield f"pool {name}: preset {preset}"
        policy = snapshot.rules.policies[name]
        for field in fields(policy):
            yield f"  {field.name.removesuffix('_s')}: {_shown(field.name, getattr(policy, field.name))}"
    for route in snapshot.routes:
        yield from _route(route, snapshot.pools[route.pool])
    for name, tenant in sorted(traffic.tenants(settings).items()):
        models = "all models" if tenant.models is None else ", ".join(sorted(tenant.models))
        yield f"tenant {name}: tier {tenant.tier}, priority {tenant.priority}, weight {tenant.weight:g}, {models}"
        wait = "as the pool says" if tenant.max_wait_s is None else show_seconds(tenant.max_wait_s)
        yield f"  max_wait: {wait}"
        yield from _limit("  ", snapshot.rules.limits.tenants.get(name))
    limits = snapshot.rules.limits
    for kind, bound in (
        ("all requests", limits.everything),
        *((f"model {name}", bound) for name, bound in limits.models.items()),
        *((f"route {name}", bound) for name, bound in limits.routes.items()),
        *(
            (f"tenant {tenant}, model {model}", bound)
            for (tenant, model), bound in limits.tenant_models.items()
        ),
        ("each client address", limits.client),
    ):
        if bound:
            yield f"{kind}:"
            yield from _limit("  ", bound)
    for said in settings.schedules:
        yield (
            f"schedule {said.name}: {', '.join(said.days)}, {said.begin // 60:02}:{said.begin % 60:02} to "
            + (f"{said.end // 60:02}:{said.end % 60:02} {said.timezone}")
        )


def _route(route: Route, pool: Pool) -> Iterator[str]:
    match = route.match
    asked = [
        *(f"model {name}" for name in sorted(match.models)),
        *(f"header {name}: {value}" for name, value in match.headers.items()),
        *([f"path {match.path_prefix}"] if match.path_prefix else []),
    ]
    yield f"route {route.name}: {', '.join(asked) or 'every request'} -> pool {route.pool}"
    yield f"  strategy: {route.strategy or f'{pool.strategy} (the pool)'}"
    if route.model is not None:
        yield f"  model: {route.model}"
    if route.weights:
        yield "  weights: " + ", ".join(f"{version} {share:g}" for version, share in route.weights.items())


def _limit(indent: str, bound: Limit | None) -> Iterator[str]:
    if bound is None or not bound:
        return
    words = {
        "rpm": bound.rpm,
        "tpm": bound.tpm,
        "tokens_per_day": bound.tokens_per_day,
        "concurrency": bound.concurrency,
    }
    yield indent + ", ".join(f"{name} {value:g}" for name, value in words.items() if value is not None)


def _shown(name: str, value: object) -> str:
    if value is None:
        return "none" if name == "fallback" else "not asked"
    if name.endswith("_s") and isinstance(value, float):
        return show_seconds(value)
    if name == "max_bytes" and isinstance(value, int):
        return show_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
