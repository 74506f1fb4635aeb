"""Settings -> tenants, limits, policies: what identity and admission work with.

Rules of this file: a tenant's own word goes before its tier's, its tier's before the default; a pool's own word before
its preset's, that before the top level's, that before the top level's preset's. Open schedules go before all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from zoneinfo import ZoneInfo

from extproc.admission.policy import DEFAULT_PRESET, PRESETS, Policy
from extproc.admission.rules import AdmissionRules
from extproc.config.schema import Settings
from extproc.config.schema.admission import AdmissionSettings, ScheduleSettings
from extproc.config.schema.traffic import TenantSettings, TierSettings, TrafficLimit
from extproc.config.secrets import key_digests
from extproc.limits.limit import Limit, LimitRules
from extproc.routing.identity import Claim, Identity
from extproc.routing.schedule import Window
from extproc.routing.tenant import ANONYMOUS, Tenant

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DEFAULT_TIER = "default"


def tier_of(settings: Settings, said: TenantSettings) -> TierSettings:
    """The tier of a tenant; one that is not declared has the defaults."""
    return settings.tiers.get(said.tier or DEFAULT_TIER) or TierSettings()


def tenants(settings: Settings) -> dict[str, Tenant]:
    """All tenants by name; the anonymous one where it is allowed."""
    found = {name: _tenant(name, said, tier_of(settings, said)) for name, said in settings.tenants.items()}
    targets = _targets(settings)
    anonymous = settings.identity.anonymous
    if settings.tenants and anonymous is not None:
        tier = settings.tiers.get(anonymous) or TierSettings()
        found[ANONYMOUS.name] = _tenant(ANONYMOUS.name, None, tier, tier_name=anonymous)
    return {
        name: replace(tenant, other_names=_other_names(tenant, targets)) for name, tenant in found.items()
    }


def identity(settings: Settings) -> Identity:
    """Who is who.

    Raises:
        SecretError: a key cannot be read.
    """
    everyone = tenants(settings)
    keys: dict[bytes, Tenant] = {}
    clients: dict[str, Tenant] = {}
    for name, said in settings.tenants.items():
        for reference in said.keys:
            for found in key_digests(reference):
                keys[found] = everyone[name]
        for client in said.clients:
            clients[client] = everyone[name]
    claims = []
    for text in settings.identity.claims:
        namespace, _, path = text.rpartition(":")
        claims.append(Claim(namespace, tuple(path.split("."))))
    return Identity(
        MappingProxyType(keys),
        MappingProxyType(clients),
        tuple(claims),
        settings.identity.header,
        settings.identity.client_certificate,
        everyone.get(ANONYMOUS.name),
        enabled=bool(settings.tenants),
    )


def active(settings: Settings, wall: float) -> tuple[str, ...]:
    """Names of the schedules that are open at this Unix time, in the file's order."""
    return tuple(said.name for said in settings.schedules if _open(said, wall))


def rules(settings: Settings, pools: Sequence[str], names: Sequence[str] = ()) -> AdmissionRules:
    """Limits and policies while these schedules are open."""
    now_open = [said for said in settings.schedules if said.name in names]
    everyone = tenants(settings)
    fallback = {name: said.fallback_pool for name, said in settings.pools.items()}
    total = settings.rate_limits.total
    of_tier: dict[str, TrafficLimit] = {}
    of_tenant: dict[str, TrafficLimit] = {}
    for schedule in now_open:
        fallback.update(schedule.fallback)
        total = schedule.total or total
        of_tier.update(schedule.tiers)
        of_tenant.update(schedule.tenants)
    tenant_limits, model_limits = {}, {}
    for name, tenant in everyone.items():
        said = settings.tenants.get(name)
        tier = settings.tiers.get(tenant.tier) or TierSettings()
        own = said.limits if said is not None and said.limits is not None else tier.limits
        tenant_limits[name] = limit(of_tenant.get(name) or of_tier.get(tenant.tier) or own)
        for model, bound in {**tier.model_limits, **(said.model_limits if said is not None else {})}.items():
            model_limits[name, model] = limit(bound)
    priorities = {tenant.priority for tenant in everyone.values()}
    return AdmissionRules(
        policies={name: policy(settings, name, fallback.get(name)) for name in pools},
        limits=LimitRules(
            everything=limit(total),
            models={name: limit(said) for name, said in settings.rate_limits.models.items()},
            tenants={name: bound for name, bound in tenant_limits.items() if bound},
            tenant_models=model_limits,
            routes={
                route.name: limit(route.rate_limit)
                for route in settings.routes
                if route.rate_limit is not None
            },
            client=limit(settings.rate_limits.client),
        ),
        highest=max(priorities) if len(priorities) > 1 else None,
    )


def weights(settings: Settings, names: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Route -> weights, of routes that these schedules change."""
    found: dict[str, Mapping[str, float]] = {}
    for said in settings.schedules:
        if said.name in names:
            found.update(said.weights)
    return found


def policy(settings: Settings, pool: str, fallback: str | None) -> Policy:
    """What holds for a pool."""
    top = settings.admission
    said = settings.pools[pool].admission if pool in settings.pools else None
    own = said or AdmissionSettings()
    if own.preset is not None:
        base = PRESETS[own.preset]
    else:
        base = _overridden(PRESETS[top.preset or DEFAULT_PRESET], top)
    return replace(_overridden(base, own), fallback=fallback)


def longest_wait_s(settings: Settings) -> float:
    """The longest that any request may wait in a queue; pools that only clusters name have the top level's word."""
    waits = [policy(settings, name, None).max_wait_s for name in (*settings.pools, "")]
    waits += [tenant.max_wait_s or 0.0 for tenant in tenants(settings).values()]
    return max(waits)


def limit(said: TrafficLimit) -> Limit:
    """As the core wants it."""
    return Limit(said.rpm, said.tpm, said.tokens_per_day, said.concurrency, said.burst)


def _overridden(base: Policy, said: AdmissionSettings) -> Policy:
    """``base`` with what is written. 0 (or 1 for the error rate) turns a question off, as the reference says."""
    changes: dict[str, object] = {}
    for field, value in (
        ("max_wait_s", said.max_wait),
        ("max_requests", said.max_requests),
        ("max_bytes", said.max_bytes),
        ("min_share", said.min_share),
        ("headroom", said.headroom),
        ("aging_s", said.aging),
        ("order", said.order),
        ("fallback_after_s", said.fallback_after),
    ):
        if value is not None:
            changes[field] = value
    for field, value, off in (
        ("max_ttft_s", said.max_ttft, 0.0),
        ("max_kv_usage", said.max_kv_usage, 0.0),
        ("error_rate", said.error_rate, 1.0),
    ):
        if value is not None:
            changes[field] = None if value == off else value
    return replace(base, **changes)  # type: ignore[arg-type]


def _tenant(
    name: str, said: TenantSettings | None, tier: TierSettings, tier_name: str = DEFAULT_TIER
) -> Tenant:
    models = tier.models if said is None or said.models is None else said.models
    return Tenant(
        name,
        tier=tier_name if said is None else said.tier or DEFAULT_TIER,
        priority=tier.priority if said is None or said.priority is None else said.priority,
        models=None if models is None else frozenset(models),
        route=tier.route if said is None or said.route is None else said.route,
        weight=tier.weight if said is None or said.weight is None else said.weight,
        max_wait_s=tier.max_wait if said is None or said.max_wait is None else said.max_wait,
        fallback=tier.fallback if said is None or said.fallback is None else said.fallback,
    )


def _targets(settings: Settings) -> dict[str, set[str]]:
    """Name -> every model that a pool's aliases or a route put in its place."""
    found: dict[str, set[str]] = {}
    for pool in settings.pools.values():
        for alias, target in pool.aliases.items():
            found.setdefault(alias, set()).add(target)
    for route in settings.routes:
        if route.model is not None:
            for name in route.match.model:
                found.setdefault(name, set()).add(route.model)
    return found


def _other_names(tenant: Tenant, targets: Mapping[str, set[str]]) -> frozenset[str]:
    """Names of which a tenant may use whatever they stand for."""
    allowed = tenant.models
    return (
        frozenset() if allowed is None else frozenset(name for name, to in targets.items() if to <= allowed)
    )


def _open(said: ScheduleSettings, wall: float) -> bool:
    local = datetime.fromtimestamp(wall, UTC).astimezone(ZoneInfo(said.timezone))
    window = Window(frozenset(_DAYS.index(day) for day in said.days), said.begin, said.end)
    return window.holds(local.weekday(), local.hour * 60 + local.minute)
