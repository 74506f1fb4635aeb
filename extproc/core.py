"""The core in one object: fleet, cache view, ledger, dispatcher and learner, wired. Production and replay use the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping

from extproc.admission.admission import Admission
from extproc.admission.dispatcher import Considered, Dispatcher
from extproc.admission.rules import AdmissionRules
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.fleet import Fleet
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.hashing import BLOCK_BYTES
from extproc.kvcache.view import CacheView
from extproc.learning import Learner
from extproc.ledger import Ledger, Settlement
from extproc.outcome import End, FailedAttempt, Renewal
from extproc.release.releases import Releases
from extproc.release.rollout import Event
from extproc.release.shadow import Shadows
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.scheduling.registry import build as build_strategy
from extproc.scheduling.strategy import Strategy


class Core:
    """Everything that decides, accounts and learns. No clock, no socket: ``now`` is monotonic seconds.

    ``seed`` is the installation's secret for block hashes; ``dead_after_s`` is how long a lease may be silent.
    ``build`` makes strategies by name. ``precise_blocks`` and ``worth``: see :class:`CacheView`.
    """

    def __init__(
        self,
        *,
        rng: random.Random,
        seed: int = 0,
        max_blocks: int = 2_000_000,
        block_bytes: int = BLOCK_BYTES,
        precise_blocks: int = 2_000_000,
        worth: Mapping[str, float] | None = None,
        dead_after_s: float = 180.0,
        on_considered: Callable[[Considered, float], None] | None = None,
        on_settled: Callable[[Settlement, float], None] | None = None,
        on_released: Callable[[Event], None] = lambda event: None,
        build: Callable[[str, Mapping[str, object], random.Random], Strategy] = build_strategy,
    ) -> None:
        self.models = ModelStats()
        self.view = CacheView(
            ApproximateIndex(max_blocks),
            self.models,
            seed=seed,
            block_bytes=block_bytes,
            precise_blocks=precise_blocks,
            worth=worth,
        )
        self.fleet = Fleet(on_purge=self.view.purge)
        self.learner = Learner(self.models, self.view)
        self.ledger = Ledger(self.fleet, self.view, dead_after_s=dead_after_s, on_settled=self._settled)
        self.dispatcher = Dispatcher(
            self.fleet, self.ledger, self.view, self.models, rng, on_considered, build
        )
        self.admission = Admission(self.fleet, self.dispatcher, self.models)
        self.releases = Releases(self._has_version, on_released)
        self.dispatcher.version_for = self.releases.version_for
        self.admission.on_trial = self.releases.on_trial
        self.shadows = Shadows()
        self._on_settled = on_settled
        self._prior_rates: dict[str, float] = {}
        self._known_rates: dict[str, float] = {}
        """Pool -> what its engines did when they were last measured, perhaps in an earlier run."""

    def install(
        self,
        router: Router,
        specs: Iterable[EndpointSpec],
        rules: AdmissionRules | None = None,
        now: float = 0.0,
    ) -> tuple[list[Endpoint], list[Endpoint]]:
        """Take over a configuration; returns the endpoints added and removed."""
        pools: Mapping[str, Pool] = router.pools
        self._prior_rates = {
            name: self._known_rates.get(name, pool.prefill_rate) for name, pool in pools.items()
        }
        changed = self.fleet.apply(specs, self._prior_rates)
        self.rule(router, rules or AdmissionRules(), now)
        return changed

    def rule(self, router: Router, rules: AdmissionRules, now: float) -> None:
        """Take over routes and rules; endpoints stay."""
        self.dispatcher.install(router)
        self.admission.install(rules, now)

    def speeds(self) -> dict[str, tuple[float, float]]:
        """Pool -> prefill rate of its engines when last measured (tokens a second) and attention's share."""
        return {name: (rate, self.models.attention(name).share) for name, rate in self._known_rates.items()}

    def restore_speeds(self, speeds: Mapping[str, tuple[float, float]]) -> None:
        """What :meth:`speeds` said in an earlier run: engines are taken to be so fast until they are measured."""
        for name, (rate, share) in speeds.items():
            if 0.0 < rate < math.inf and 0.0 < share < math.inf:
                self._known_rates[name] = rate
                self.models.attention(name).share = share
                if name in self._prior_rates:
                    self._prior_rates[name] = rate

    def take(self, event: End | Renewal | FailedAttempt, now: float) -> None:
        """One event of the access log."""
        if isinstance(event, End):
            self.ledger.ended(event, now)
        elif isinstance(event, Renewal):
            self.ledger.renewed(event, now)
        else:
            self.ledger.attempt_failed(event, now)

    def housekeep(self, now: float) -> None:
        """Once a second or so: dead leases, shared rates, sizes of the caches, leftovers of purges."""
        self.ledger.sweep(now)
        self.fleet.share_rates(now, self._prior_rates)
        self._remember_rates(now)
        for endpoint in self.fleet.endpoints.values():
            self.view.fit(endpoint, endpoint.spec.models[0] if endpoint.spec.models else "")
        self.view.drain()
        self.dispatcher.sessions.sweep(now)
        self.admission.poll(now)
        self.releases.tick(now)
        self.shadows.tick(now)
        self.ledger.forget(self.fleet.endpoints)

    def _remember_rates(self, now: float) -> None:
        """What endpoints share while they are measured is the prior of their pool in a silence, and after a restart."""
        for name in self._prior_rates:
            rates = [endpoint.rates for endpoint in self.fleet.pool(name)]
            if any(one.fresh(now) for one in rates):
                self._prior_rates[name] = self._known_rates[name] = rates[0].prior

    def _has_version(self, pool: str, version: str) -> bool:
        return any(endpoint.spec.version == version for endpoint in self.fleet.pool(pool))

    def _settled(self, settlement: Settlement, now: float) -> None:
        self.learner.learn(settlement, now)
        lease = settlement.lease
        if lease.session and lease.attempts > 1 and not lease.endpoint.removed:
            # Envoy went on to another endpoint: the session's state is there now.
            self.dispatcher.sessions.decided(lease.pool, lease.session, lease.endpoint, now)
        self.admission.settled(settlement, now)
        self.releases.settled(settlement)
        self.shadows.settled(settlement)
        if self._on_settled is not None:
            self._on_settled(settlement, now)
