"""Do tenants, limits, fallbacks and schedules fit the pools and routes? One function a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec

from extproc.config.envoy_message import did_you_mean
from extproc.config.problem import Problem
from extproc.config.schema import Settings
from extproc.config.schema.traffic import TenantSettings, TierSettings
from extproc.config.secrets import SecretError, key_digests, secret
from extproc.config.traffic import DEFAULT_TIER
from extproc.config.yaml_source import Document, NodePath
from extproc.routing.pool import Pool
from extproc.routing.tenant import ANONYMOUS


def crosscheck_traffic(
    settings: Settings, versions: Mapping[str, frozenset[str]], pools: Mapping[str, Pool], document: Document
) -> list[Problem]:
    """Everything that does not fit, warnings included. ``versions``: pool -> versions of its clusters."""
    models = {name for pool in pools.values() for name in (*pool.models, *pool.adapters, *pool.aliases)}
    models |= {name for route in settings.routes for name in route.match.model}
    return [
        *_tiers(settings, models, document),
        *_tenants(settings, models, document),
        *_keys(settings, document),
        *_fallbacks(settings, pools, document),
        *_limits(settings, models, document),
        *_schedules(settings, versions, pools, document),
    ]


def _unknown(kind: str, word: str, known: Iterable[str]) -> str:
    names = list(known)
    return f"there is no {kind} `{word}`{did_you_mean(word, names) or '.'} There are: {', '.join(names[:20]) or 'none'}"


def _tiers(settings: Settings, models: set[str], document: Document) -> Iterator[Problem]:
    for name, tier in settings.tiers.items():
        yield from _same_words(("tiers", name), tier, settings, models, document)
    anonymous = settings.identity.anonymous
    if anonymous is not None and anonymous not in settings.tiers and anonymous != DEFAULT_TIER:
        yield document.problem(("identity", "anonymous"), _unknown("tier", anonymous, settings.tiers))
    if settings.tiers and not settings.tenants:
        yield document.problem(
            ("tiers",), "there are tiers but no `tenants`, so nobody belongs to one", fatal=False
        )


def _tenants(settings: Settings, models: set[str], document: Document) -> Iterator[Problem]:
    owner: dict[str, str] = {}
    for name, said in settings.tenants.items():
        at: NodePath = ("tenants", name)
        if name == ANONYMOUS.name and settings.identity.anonymous is not None:
            yield document.problem(at, "`anonymous` is who comes without a key; choose another name")
        if said.tier is not None and said.tier not in settings.tiers:
            yield document.problem((*at, "tier"), _unknown("tier", said.tier, settings.tiers))
        yield from _same_words(at, said, settings, models, document)
        for client in said.clients:
            if client in owner:
                yield document.problem(
                    (*at, "clients"), f"client `{client}` is tenant `{owner[client]}` already; remove one"
                )
            owner.setdefault(client, name)
        if said.clients and not _vouches(settings):
            yield document.problem(
                (*at, "clients"),
                f"nothing vouches for the clients of tenant `{name}`: say where Envoy names them in `identity`",
            )


def _vouches(settings: Settings) -> bool:
    said = settings.identity
    return bool(said.claims or said.header or said.client_certificate)


def _same_words(
    at: NodePath,
    said: TenantSettings | TierSettings,
    settings: Settings,
    models: set[str],
    document: Document,
) -> Iterator[Problem]:
    """What tenants and tiers have in common."""
    routes = [route.name for route in settings.routes]
    if said.route is not None and said.route not in routes:
        yield document.problem((*at, "route"), _unknown("route", said.route, routes))
    for model in (*(said.models or ()), *said.model_limits):
        if model not in models:
            yield document.problem(
                at,
                f"no pool serves model `{model}` (unless an engine reports an adapter of that name)"
                f"{did_you_mean(model, list(models))}",
                fatal=False,
            )


def _keys(settings: Settings, document: Document) -> Iterator[Problem]:
    owner: dict[bytes, str] = {}
    for name, said in settings.tenants.items():
        for reference in said.keys:
            at: NodePath = ("tenants", name, "keys")
            try:
                digests = key_digests(reference)
            except SecretError as error:
                yield document.problem(at, str(error))
                continue
            for found in digests:
                if owner.setdefault(found, name) != name:
                    yield document.problem(
                        at,
                        f"a key of tenant `{name}` is a key of tenant `{owner[found]}` too; give each its own",
                    )
    for name, pool in settings.pools.items():
        if pool.upstream_key is not None:
            try:
                secret(pool.upstream_key)
            except SecretError as error:
                yield document.problem(("pools", name, "upstream_key"), str(error))
    if settings.rate_limits.store == "redis" and find_spec("redis") is None:
        yield document.problem(
            ("rate_limits", "store"),
            "the client of the store is not installed; run `pip install extproc[redis]`",
        )
    if settings.rate_limits.store == "redis" and settings.rate_limits.redis.password is not None:
        try:
            secret(settings.rate_limits.redis.password)
        except SecretError as error:
            yield document.problem(("rate_limits", "redis", "password"), str(error))


def _fallbacks(settings: Settings, pools: Mapping[str, Pool], document: Document) -> Iterator[Problem]:
    named: list[tuple[NodePath, str, str | None]] = [
        (("pools", name, "fallback_pool"), name, pool.fallback_pool) for name, pool in settings.pools.items()
    ]
    for position, schedule in enumerate(settings.schedules):
        named += [
            (("schedules", position, "fallback", name), name, to) for name, to in schedule.fallback.items()
        ]
    for at, name, to in named:
        if to is None:
            continue
        if to == name:
            yield document.problem(at, f"pool `{name}` cannot be its own fallback; name another pool")
        elif to not in pools:
            yield document.problem(at, _unknown("pool", to, pools))
        elif not pools[to].models:
            yield document.problem(
                at, f"no model of pool `{to}` is known, so nothing can be asked of it; give it `models`"
            )


def _limits(settings: Settings, models: set[str], document: Document) -> Iterator[Problem]:
    for model in settings.rate_limits.models:
        if model not in models:
            yield document.problem(
                ("rate_limits", "models", model),
                f"no pool serves model `{model}` (unless an engine reports an adapter of that name), so this limits "
                f"nothing{did_you_mean(model, list(models))}",
                fatal=False,
            )


def _schedules(
    settings: Settings, versions: Mapping[str, frozenset[str]], pools: Mapping[str, Pool], document: Document
) -> Iterator[Problem]:
    routes = {route.name: route.pool for route in settings.routes}
    seen: set[str] = set()
    for position, said in enumerate(settings.schedules):
        at: NodePath = ("schedules", position)
        if said.name in seen:
            yield document.problem(
                (*at, "name"), f"schedule `{said.name}` exists already; choose another name"
            )
        seen.add(said.name)
        for kind, words, known in (
            ("weights", said.weights, list(routes)),
            ("tiers", said.tiers, [*settings.tiers, DEFAULT_TIER]),
            ("tenants", said.tenants, list(settings.tenants)),
            ("fallback", said.fallback, list(pools)),
        ):
            for word in words:
                if word not in known:
                    noun = {"weights": "route", "fallback": "pool"}.get(kind, kind[:-1])
                    yield document.problem((*at, kind, word), _unknown(noun, word, known))
        for route, weights in said.weights.items():
            known_versions = versions.get(routes.get(route, ""), frozenset())
            for version, weight in weights.items():
                if weight and known_versions and version not in known_versions:
                    yield document.problem(
                        (*at, "weights", route),
                        _unknown(
                            f"version of pool `{routes[route]}` called", version, sorted(known_versions)
                        ),
                    )
