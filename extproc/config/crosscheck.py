"""Do settings and clusters fit each other? One function a question; each yields problems at the settings'
lines."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping

from extproc.config.address import parse_address
from extproc.config.clusters import Clusters
from extproc.config.crosscheck_traffic import crosscheck_traffic
from extproc.config.envoy_message import did_you_mean
from extproc.config.problem import Problem
from extproc.config.schema import Settings
from extproc.config.schema.pools import RouteSettings
from extproc.config.yaml_source import Document, NodePath
from extproc.routing.pool import Pool
from extproc.scheduling import registry


def crosscheck(
    settings: Settings, clusters: Clusters, pools: Mapping[str, Pool], document: Document
) -> list[Problem]:
    """Everything that does not fit, warnings included."""
    return [
        *_pools(settings, clusters, pools, document),
        *_ambiguous_models(settings, pools, document),
        *_routes(settings, clusters, pools, document),
        *_releases(settings, clusters, pools, document),
        *_strategies(settings, document),
        *_tokenizers(settings, document),
        *_sockets(settings, document),
        *crosscheck_traffic(settings, _versions(clusters), pools, document),
    ]


def _versions(clusters: Clusters) -> dict[str, frozenset[str]]:
    """Pool -> versions that its clusters name."""
    found: dict[str, set[str]] = {}
    for spec in clusters.endpoints:
        found.setdefault(spec.pool, set()).add(spec.version)
    return {pool: frozenset(names) for pool, names in found.items()}


def _instead(word: str, known: Iterable[str]) -> str:
    """What exists, the likeliest first: ``; did you mean `x`? There are: x, y``."""
    names = list(known)
    listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "") or "none"
    return f"{did_you_mean(word, names) or '.'} There are: {listed}"


def _pools(
    settings: Settings, clusters: Clusters, pools: Mapping[str, Pool], document: Document
) -> Iterator[Problem]:
    inhabited = {spec.pool for spec in clusters.endpoints}
    for name in settings.pools:
        at: NodePath = ("pools", name)
        if name not in inhabited:
            hint = did_you_mean(name, list(inhabited))
            yield document.problem(
                at,
                f"no cluster names pool `{name}` in its metadata, so it has no endpoints{hint}",
                fatal=False,
            )
        pool = pools[name]
        for alias, target in pool.aliases.items():
            if alias in pool.models or alias in pool.adapters:
                yield document.problem(
                    (*at, "aliases", alias),
                    f"alias `{alias}` is also a model or adapter of pool `{name}`; remove one of them",
                )
            elif pool.models and target not in pool.models and target not in pool.adapters:
                yield document.problem(
                    (*at, "aliases", alias),
                    f"alias `{alias}` stands for `{target}`, which pool `{name}` does not serve unless "
                    f"an engine reports an adapter of that name{did_you_mean(target, list(pool.models))}",
                    fatal=False,
                )
    if settings.default_pool is not None and settings.default_pool not in pools:
        yield document.problem(
            ("default_pool",),
            f"there is no pool `{settings.default_pool}`{_instead(settings.default_pool, pools)}",
        )


def _releases(
    settings: Settings, clusters: Clusters, pools: Mapping[str, Pool], document: Document
) -> Iterator[Problem]:
    """Releases between versions that exist, shadows that lead elsewhere."""
    for name, said in settings.pools.items():
        at: NodePath = ("pools", name)
        if said.release is not None:
            versions = sorted({spec.version for spec in clusters.endpoints if spec.pool == name} - {""})
            for role in ("baseline", "candidate"):
                version = getattr(said.release, role)
                if version not in versions:
                    yield document.problem(
                        (*at, "release", role),
                        f"no cluster of pool `{name}` has version `{version}` in its metadata"
                        + _instead(version, versions),
                        fatal=False,
                    )
            for place, route in enumerate(settings.routes):
                if route.pool == name and route.weights:
                    yield document.problem(
                        ("routes", place, "weights"),
                        f"pool `{name}` has a release, which splits its versions; these weights are not used",
                        fatal=False,
                    )
        if said.shadow is not None and said.shadow.pool == name:
            yield document.problem((*at, "shadow", "pool"), "the copies must go to another pool")
        elif said.shadow is not None and said.shadow.pool not in pools:
            yield document.problem(
                (*at, "shadow", "pool"),
                f"there is no pool `{said.shadow.pool}`{_instead(said.shadow.pool, pools)}",
            )


def _tokenizers(settings: Settings, document: Document) -> Iterator[Problem]:
    """Folders that hold no tokenizer: their pools would be approximate."""
    for name, said in settings.pools.items():
        if said.tokenizer is not None and not (said.tokenizer / "tokenizer.json").is_file():
            yield document.problem(
                ("pools", name, "tokenizer"),
                f"there is no `tokenizer.json` in {said.tokenizer}; name the model's folder, as the engines load it",
                fatal=False,
            )


def _ambiguous_models(settings: Settings, pools: Mapping[str, Pool], document: Document) -> Iterator[Problem]:
    """The same name in two pools is fine where something says which of them answers a plain request for
    it."""
    owners: dict[str, list[str]] = {}
    for name, pool in pools.items():
        for model in {*pool.models, *pool.adapters, *pool.aliases}:
            owners.setdefault(model, []).append(name)
    for model, names in sorted(owners.items()):
        if len(names) < 2 or settings.default_pool in names or _routed(model, settings):
            continue
        declared = next((name for name in reversed(names) if name in settings.pools), None)
        yield document.problem(
            ("pools", declared) if declared is not None else ("routes",),
            f"model `{model}` is served by pools {' and '.join(f'`{name}`' for name in names)}, and "
            f"no route says which of them answers: add a route with `match: {{model: {model}}}` and a pool, "
            "or set `default_pool` to one of them, or make them versions of one pool",
        )


def _routed(model: str, settings: Settings) -> bool:
    return any(
        not route.match.header
        and not route.match.path
        and (not route.match.model or model in route.match.model)
        for route in settings.routes
    )


def _routes(
    settings: Settings, clusters: Clusters, pools: Mapping[str, Pool], document: Document
) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for position, route in enumerate(settings.routes):
        at: NodePath = ("routes", position)
        if route.name in seen:
            first = document.line(("routes", seen[route.name]))
            yield document.problem(
                (*at, "name"), f"route `{route.name}` exists already on line {first}; choose another name"
            )
        seen.setdefault(route.name, position)
        if route.pool not in pools:
            yield document.problem(
                (*at, "pool"),
                f"route `{route.name}` names pool `{route.pool}`, which does not exist"
                f"{_instead(route.pool, pools)}",
            )
            continue
        yield from _route_models(route, pools[route.pool], at, document)
        yield from _route_weights(route, clusters, at, document)


def _route_models(route: RouteSettings, pool: Pool, at: NodePath, document: Document) -> Iterator[Problem]:
    known = {*pool.models, *pool.adapters, *pool.aliases}
    if not pool.models:
        return
    if route.model is not None and route.model not in known:
        yield document.problem(
            (*at, "model"),
            f"route `{route.name}` puts in model `{route.model}`, which pool `{pool.name}` does not "
            f"serve unless an engine reports an adapter of that name{did_you_mean(route.model, list(known))}",
            fatal=False,
        )
    strangers = [model for model in route.match.model if model not in known] if route.model is None else []
    for model in strangers:
        yield document.problem(
            (*at, "match", "model"),
            f"route `{route.name}` matches model `{model}`, which pool `{pool.name}` does not serve, so such "
            "requests get a 404 unless an engine reports an adapter of that name; "
            f"add an alias to the pool, or `model:` to the route{did_you_mean(model, list(known))}",
            fatal=False,
        )


def _route_weights(
    route: RouteSettings, clusters: Clusters, at: NodePath, document: Document
) -> Iterator[Problem]:
    versions = sorted({spec.version for spec in clusters.endpoints if spec.pool == route.pool})
    if not versions:
        return
    for version, weight in route.weights.items():
        if weight and version not in versions:
            named = [name for name in versions if name]
            yield document.problem(
                (*at, "weights", version),
                f"route `{route.name}` gives weight to version `{version}`, which no cluster of pool "
                f"`{route.pool}` names in its metadata{_instead(version, named)}",
            )


def _strategies(settings: Settings, document: Document) -> Iterator[Problem]:
    places: list[tuple[NodePath, str, Mapping[str, object]]] = [
        (("pools", name), pool.strategy, pool.options) for name, pool in settings.pools.items()
    ]
    for position, route in enumerate(settings.routes):
        if route.strategy is not None:
            places.append((("routes", position), route.strategy, route.options))
        elif route.options:
            yield document.problem(
                ("routes", position, "options"),
                f"route `{route.name}` has `options` but no `strategy` that they are for; add `strategy:`",
            )
    for at, name, options in places:
        if name not in registry.NAMES:
            yield document.problem(
                (*at, "strategy"),
                f"unknown strategy `{name}`{_instead(name, sorted(registry.NAMES))}",
            )
            continue
        try:
            registry.build(name, options, random.Random(0))
        except ValueError as error:
            yield document.problem((*at, "options"), str(error))


def _sockets(settings: Settings, document: Document) -> Iterator[Problem]:
    listen = settings.listen
    if not parse_address(listen.admin).is_local and listen.admin_token_file is None:
        yield document.problem(
            ("listen", "admin"),
            f"`admin: {listen.admin}` can be reached from other machines, so requests that change something "
            "are refused; add `admin_token_file` to allow them with a token",
            fatal=False,
        )
