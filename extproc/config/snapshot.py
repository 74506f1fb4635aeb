"""One whole, consistent configuration. A reload builds a new one and swaps a single reference; nothing in
it changes.

What must survive a reload (leases, learnt rates, indexes) lives elsewhere, keyed by stable identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from extproc.admission.rules import AdmissionRules
from extproc.config import traffic
from extproc.config.clusters import Clusters
from extproc.config.crosscheck import crosscheck
from extproc.config.problem import ConfigError, Problem
from extproc.config.schema import Settings
from extproc.config.schema.guard import GuardSettings
from extproc.config.schema.pools import PoolSettings, RouteSettings
from extproc.config.secrets import files as secret_files
from extproc.config.secrets import secret
from extproc.config.yaml_source import Document
from extproc.routing.guard import Guard, GuardLevel
from extproc.routing.identity import Identity
from extproc.routing.match import Router
from extproc.routing.pool import Disaggregation, Pool
from extproc.routing.route import Route, RouteMatch


@dataclass(slots=True, frozen=True)
class Snapshot:
    """Settings and clusters, checked against each other."""

    generation: int
    """Counts from 1; grows with every configuration taken."""
    settings: Settings
    pools: Mapping[str, Pool]
    """Pools declared in ``extproc.yaml`` and those that clusters name, merged."""
    routes: tuple[Route, ...]
    clusters: Clusters
    default_pool: str | None
    """Pool of requests that name no model: the configured one, or the only one."""
    router: Router
    identity: Identity
    rules: AdmissionRules
    """What holds while no schedule is open."""
    upstream_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Pool -> key that its engines want."""
    secret_files: tuple[Path, ...] = ()
    """Files of keys, watched as the configuration is."""
    warnings: tuple[Problem, ...] = ()
    """What is odd but usable."""

    def scheduled(self, names: Sequence[str]) -> tuple[Router, AdmissionRules]:
        """Routes and rules while these schedules are open."""
        if not names:
            return self.router, self.rules
        changed = traffic.weights(self.settings, names)
        routes = tuple(
            replace(route, weights=MappingProxyType(dict(changed[route.name])))
            if route.name in changed
            else route
            for route in self.routes
        )
        router = Router(self.pools, routes, self.settings.default_pool)
        return router, traffic.rules(self.settings, list(self.pools), names)

    @property
    def pool_of_model(self) -> Mapping[str, str]:
        """Every configured client-facing model name (models, adapters, aliases) -> pool."""
        return self.router.pool_of_model

    def model_names(self) -> list[tuple[str, str]]:
        """Client-facing model ids with their pools, for /v1/models. Names that only a route knows are among
        them; adapters learnt from the engines are not."""
        names = dict(self.pool_of_model)
        for route in self.routes:
            if route.model is not None and not route.match.headers and not route.match.path_prefix:
                for model in sorted(route.match.models):
                    names.setdefault(model, route.pool)
        return list(names.items())


def build(
    settings: Settings, clusters: Clusters, generation: int = 1, *, document: Document | None = None
) -> Snapshot:
    """Merge and check. ``document`` is where ``settings`` came from, for the lines of problems.

    Raises:
        ConfigError: when the two do not fit each other; warnings are among its problems.
    """
    document = document if document is not None else Document("extproc.yaml", {})
    pools = _pools(settings, clusters)
    problems = crosscheck(settings, clusters, pools, document)
    if any(problem.fatal for problem in problems):
        raise ConfigError([*problems, *clusters.warnings])
    routes = tuple(_route(route) for route in settings.routes)
    router = Router(pools, routes, settings.default_pool)
    return Snapshot(
        generation=generation,
        settings=settings,
        pools=MappingProxyType(pools),
        routes=routes,
        clusters=clusters,
        default_pool=router.default_pool,
        router=router,
        identity=traffic.identity(settings),
        rules=traffic.rules(settings, list(pools)),
        upstream_keys=MappingProxyType(
            {name: secret(said.upstream_key) for name, said in settings.pools.items() if said.upstream_key}
        ),
        secret_files=secret_files(_references(settings)),
        warnings=tuple(sorted([*problems, *clusters.warnings])),
    )


def _references(settings: Settings) -> list[str]:
    found = [reference for said in settings.tenants.values() for reference in said.keys]
    return found + [said.upstream_key for said in settings.pools.values() if said.upstream_key]


def _pools(settings: Settings, clusters: Clusters) -> dict[str, Pool]:
    served: dict[str, dict[str, None]] = {name: {} for name in settings.pools}
    for spec in clusters.endpoints:
        served.setdefault(spec.pool, {}).update(dict.fromkeys(spec.models))
    return {
        name: _pool(name, settings.pools.get(name) or PoolSettings(), list(models))
        for name, models in served.items()
    }


def _pool(name: str, said: PoolSettings, models: list[str]) -> Pool:
    return Pool(
        name=name,
        models=tuple(dict.fromkeys([*said.models, *models])),
        aliases=MappingProxyType(dict(said.aliases)),
        adapters=said.adapters,
        strategy=said.strategy,
        strategy_options=MappingProxyType(dict(said.options)),
        prefill_rate=said.prefill_tokens_per_second,
        fallbacks=said.fallbacks,
        disaggregation=Disaggregation(
            said.disaggregation.header,
            said.disaggregation.min_uncached_tokens,
            said.disaggregation.transfer_tokens_per_second,
        ),
    )


def _route(said: RouteSettings) -> Route:
    return Route(
        name=said.name,
        match=RouteMatch(
            models=frozenset(said.match.model),
            headers=MappingProxyType({name.lower(): value for name, value in said.match.header.items()}),
            path_prefix=said.match.path,
        ),
        pool=said.pool,
        strategy=said.strategy,
        strategy_options=MappingProxyType(dict(said.options)),
        weights=MappingProxyType(dict(said.weights)),
        model=said.model,
        pin=said.session == "pin",
        guard=_guard(said.guard),
    )


def _guard(said: GuardSettings | None) -> Guard | None:
    if said is None:
        return None
    return Guard(
        GuardLevel(said.level), said.first_token, said.heartbeat, said.idle, said.total, said.per_token
    )
