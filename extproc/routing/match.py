"""Which pool answers a request, and what becomes of its model name.

Rules of this file, in order:

1. the first declared route whose conditions hold rules. Its pool must serve the model (or the route names
   the model to put in); if it does not, the request is refused rather than sent past the route to another
   pool;
2. else the tenant's own route, where its pool serves the model or the request names none;
3. else the pool that serves the model: by the name its engines know, by an alias, by a LoRA adapter
   (configured or learnt from the engines), or the default pool when nothing is known of the models it serves;
4. a model that nobody serves is a 404, whatever the path; a request that names none goes to the default pool.

A route that names a model also rules requests for its aliases, or an alias would be a way around the route.
Model names are opaque: ``a/b``, ``gpt-oss:120b`` and ``org/adapter@v1`` are never taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from extproc.api.request import Api, InferenceRequest
from extproc.routing.pool import Pool
from extproc.routing.rejection import Rejection, bad_request, model_not_found
from extproc.routing.route import Route, RouteMatch
from extproc.routing.tenant import Tenant


@dataclass(slots=True, frozen=True)
class Match:
    """A request's destination."""

    pool: Pool
    route: Route
    """The declared route, or the pool's implicit one (of the pool's name, without conditions)."""
    splice: str | None = None
    """Model name to put into the body in place of the client's; None: leave the body alone."""
    adapter: str | None = None
    """LoRA adapter that the request uses, if any."""


@dataclass(slots=True, frozen=True)
class _Served:
    """How a pool serves a model name."""

    splice: str | None = None
    adapter: str | None = None


class Router:
    """Immutable matcher built from one configuration. Cost of a match does not grow with the number of
    models."""

    def __init__(
        self, pools: Mapping[str, Pool], routes: Sequence[Route] = (), default_pool: str | None = None
    ) -> None:
        self.pools = dict(pools)
        self.routes = tuple(_with_aliases(route, self.pools) for route in routes if route.pool in self.pools)
        self._by_name = {route.name: route for route in self.routes}
        self._implicit = {name: Route(name, RouteMatch(), name) for name in self.pools}
        if default_pool is None and len(self.pools) == 1:
            default_pool = next(iter(self.pools))
        self.default_pool = default_pool if default_pool in self.pools else None
        self._served = {name: _served_names(pool) for name, pool in self.pools.items()}
        self.pool_of_model: dict[str, str] = {}
        """Client-facing name -> pool; where several pools serve it, the default pool or else the first."""
        for name in sorted(self.pools, key=lambda name: name != self.default_pool):
            for model in self._served[name]:
                self.pool_of_model.setdefault(model, name)

    def match(
        self, request: InferenceRequest, tenant: Tenant, adapters: Mapping[str, str] | None = None
    ) -> Match | Rejection:
        """Find the destination. ``adapters``: LoRA adapter -> pool, as learnt from the engines.

        Whether the tenant may use the model is not asked here.
        """
        learnt = adapters or {}
        for route in self.routes:
            if route.match.holds(request):
                return self._by_route(route, request, learnt) or self._unserved(
                    request, tenant, (route.pool,)
                )
        if tenant.route is not None and (own := self._by_name.get(tenant.route)) is not None:
            found = self._by_route(own, request, learnt)
            if found is not None:
                return found
        if request.model is None:
            return self._default(request)
        name = self.pool_of_model.get(request.model) or learnt.get(request.model)
        if name is None and self.default_pool is not None and self._takes_any(self.default_pool):
            name = self.default_pool
        if name is None or name not in self.pools:
            return self._unserved(request, tenant, tuple(self.pools))
        return self._by_route(self._implicit[name], request, learnt) or self._unserved(
            request, tenant, (name,)
        )

    def fallback(self, request: InferenceRequest, pool_name: str) -> Match | None:
        """The request into another pool, under the first name that its engines know; None when the body cannot be
        changed so or there is no such pool."""
        pool = self.pools.get(pool_name)
        if pool is None or not pool.models or request.model is None:
            return None
        if request.model in pool.models:
            return Match(pool, self._implicit[pool_name])
        if request.model_span is None:
            return None
        return Match(pool, self._implicit[pool_name], pool.models[0])

    def _by_route(self, route: Route, request: InferenceRequest, learnt: Mapping[str, str]) -> Match | None:
        pool = self.pools[route.pool]
        if request.model is None:
            return Match(pool, route)
        wanted = route.model if route.model is not None else request.model
        served = self._how(pool.name, wanted, learnt)
        if served is None:
            if route.model is None:
                return None
            served = _Served()
        name = served.splice or wanted
        return Match(pool, route, name if name != request.model else None, served.adapter)

    def _how(self, pool: str, model: str, learnt: Mapping[str, str]) -> _Served | None:
        served = self._served[pool].get(model)
        if served is None:
            if learnt.get(model) == pool:
                return _Served(adapter=model)
            return _Served() if self._takes_any(pool) else None
        if served.splice is not None and learnt.get(served.splice) == pool:
            return _Served(served.splice, served.splice)
        return served

    def _takes_any(self, pool: str) -> bool:
        return not self.pools[pool].models

    def _default(self, request: InferenceRequest) -> Match | Rejection:
        if self.default_pool is not None:
            return Match(self.pools[self.default_pool], self._implicit[self.default_pool])
        if not self.pools:
            message = "No pools are configured."
        else:
            message = "The request names no model and the gateway has no default pool."
        if request.api is Api.OTHER:
            return Rejection(404, "invalid_request_error", "not_found", message, "no_default_pool")
        return bad_request(f"{message} Set `model` in the request body.", param="model", reason="no_model")

    def _unserved(self, request: InferenceRequest, tenant: Tenant, pools: tuple[str, ...]) -> Rejection:
        known = sorted(model for pool in pools for model in self._served[pool] if tenant.sees(model))
        return model_not_found(request.model or "", known)


def _with_aliases(route: Route, pools: Mapping[str, Pool]) -> Route:
    """The route, matching also the aliases of the models it names."""
    models = route.match.models
    aliases = pools[route.pool].aliases.items()
    also = frozenset(alias for alias, target in aliases if target in models)
    if also <= models:
        return route
    return replace(route, match=replace(route.match, models=models | also))


def _served_names(pool: Pool) -> dict[str, _Served]:
    """Every name that clients may use for the pool, in the order models, adapters, aliases."""
    served = {model: _Served() for model in pool.models}
    for adapter in pool.adapters:
        served.setdefault(adapter, _Served(adapter=adapter))
    for alias, target in pool.aliases.items():
        served.setdefault(alias, _Served(target, target if target in pool.adapters else None))
    return served
