"""What every settled lease teaches: token sizes of the model, speeds and quality of the endpoint, room in its cache.

Rules of this file: only endings with a final record teach; a client that left teaches nothing about durations; usage
corrects estimates only where the engine reported it.
"""

from __future__ import annotations

from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.view import CacheView
from extproc.ledger import Settlement
from extproc.outcome import Outcome, Usage

_NO_USAGE = Usage()
_OWN_TOKENS = 1024
_ALONE = 0.1
"""A prompt that waited for less than this part of its own work teaches what its length costs."""


class Learner:
    """Feeds one settlement to everything that learns."""

    def __init__(self, models: ModelStats, view: CacheView) -> None:
        self._models = models
        self._view = view

    def learn(self, settlement: Settlement, now: float) -> None:
        """Take one settlement. Leases without a final record are ignored."""
        end, lease = settlement.end, settlement.lease
        if end is None:
            return
        endpoint = lease.endpoint
        usage = end.usage or _NO_USAGE
        duration = end.engine_s if end.engine_s is not None else end.duration_s
        ttft = end.ttft_s if lease.stream else None
        endpoint.stats.record(ttft, duration, usage.output, settlement.outcome, now)
        if settlement.outcome is not Outcome.SUCCESS:
            return
        endpoint.standstill.moved(now)
        if lease.api.generates:
            endpoint.rates.observe_completion(duration, ttft, settlement.active, now)
        if lease.adopted:
            return
        self._models.observe(
            lease.model,
            prompt_bytes=lease.prompt_bytes,
            prompt_tokens=usage.input,
            output_tokens=usage.output,
        )
        if usage.cached is not None and usage.input is not None and ttft is not None:
            self._prefill(settlement, usage.input - usage.cached, usage.cached, ttft, now)
        if usage.cached is not None:
            endpoint.rates.observe_match(lease.prompt_tokens - lease.uncached_tokens, usage.cached, now)
        if usage.output and lease.look is not None and lease.generation == endpoint.generation:
            self._view.answered(endpoint, lease.look, usage.output)

    def _prefill(self, settlement: Settlement, uncached: int, cached: int, ttft_s: float, now: float) -> None:
        """What a prompt of this length took, in the endpoint's own units of work."""
        lease, rates = settlement.lease, settlement.lease.endpoint.rates
        alone = lease.backlog_at_open <= uncached * _ALONE
        if lease.attempts == 1 and lease.prefiller is None and uncached >= _OWN_TOKENS and alone:
            units = (ttft_s - rates.step_s) * rates.prefill_at(now)
            self._models.attention(lease.pool).observe(uncached, cached, units)
