"""Learned speeds of one endpoint: prefill, completions, and how far cache matches can be trusted.

Rules of this file:

- everything starts at a prior; absurd or missing samples are skipped; nothing is ever zero, negative or NaN;
- **prefill** (units of work a second, :mod:`extproc.fleet.prefill`; a unit is a token at the start of a prompt):
  a sample is ``(work before + own work) / (TTFT - step)`` of a streamed request that hardly waited for
  others, for what was before it is a guess; or the growth of the engine's computed-tokens counter over a time
  in which it was never idle, or which was more than the estimate. The estimate is the median of the last few;
- the fewer and older the samples, the more the prior counts: what was once slow, and therefore gets no
  samples, is believed to be as fast as its peers again after a minute or two, and tried. If that try is much
  faster than what was seen before the silence, the old samples are about another time and go: nothing makes a
  sample too fast. The prior is the pool's setting until peers have samples, then their median;
- **overhead** (s): lower quartile of the TTFT of requests with hardly any prefill;
- differences from the prior that may be noise are not acted on (:mod:`extproc.fleet.noise`);
- **completion interval** (s): mean gap between completions while others were running; **service** (s): mean
  time from first token to the end;
- **match trust** (0..1): cached tokens that usage reports over those we expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from extproc.fleet.noise import beyond_noise
from extproc.fleet.pace import Pace

PRIOR_OVERHEAD = 0.02
PRIOR_SERVICE = 4.0

_WINDOW = 12
_QUANTILE = 0.5
_ALONE = 0.2
"""A request with less than this part of its own work before it hardly waited."""
_MIN_TOKENS = 256
_HALF_LIFE_S = 45.0
_PRIOR_SAMPLES = 2.0
_RECOVERED = 1.5
_SHORTEST_S = 1e-6
_BUSY_S = 2.0
_MIN_GENERATED = 32


class Rates:
    """``prefill`` is the newest estimate in tokens per second; :meth:`prefill_at` lets it age first."""

    __slots__ = (
        "_aged_at",
        "_alone_until",
        "_busy_s",
        "_busy_tokens",
        "_gap",
        "_gaps",
        "_last_completion",
        "_overheads",
        "_sampled_at",
        "_samples",
        "_trust",
        "_trust_at",
        "informed",
        "overhead",
        "pace",
        "prefill",
        "prior",
        "service",
    )

    def __init__(self, prefill: float) -> None:
        self.prior = prefill
        """What the endpoint is taken to do without samples."""
        self.informed = False
        """The prior was measured on this fleet. Before that own samples are not acted on: the first endpoint that has
        one would look different from its peers, and get everything or nothing."""
        self.prefill = prefill
        self.overhead = PRIOR_OVERHEAD
        self.pace = Pace()
        """Decode slow-down."""
        self.service = PRIOR_SERVICE
        self._samples: deque[float] = deque(maxlen=_WINDOW)
        self._overheads: deque[float] = deque(maxlen=_WINDOW)
        self._sampled_at = 0.0
        self._aged_at = float("-inf")
        self._alone_until = float("-inf")
        """When the first token of the newest request came that was alone: whoever came before that was not."""
        self._busy_s = 0.0
        self._busy_tokens = 0.0
        self._gap = 0.0
        self._gaps = 0
        self._last_completion: float | None = None
        self._trust = 1.0
        self._trust_at = 0.0

    def prefill_at(self, now: float) -> float:
        """Tokens per second, aged to ``now`` (in steps of a second)."""
        if now - self._aged_at >= 1.0:
            self._estimate(now)
        return self.prefill

    @property
    def samples(self) -> Sequence[float]:
        """The last few measurements."""
        return self._samples

    def learn_prior(self, prior: float, now: float) -> None:
        """What peers measured."""
        self.prior = prior
        if not self.informed:
            self.informed = True
            self._estimate(now)

    def fresh(self, now: float) -> bool:
        """Whether the estimate rests on recent samples: only then it may be a peer's prior."""
        return len(self._samples) >= 3 and self.seen(now)

    def seen(self, now: float) -> bool:
        """Whether there is any recent sample."""
        return bool(self._samples) and now - self._sampled_at < _HALF_LIFE_S

    @property
    def step_s(self) -> float:
        """Seconds that a prompt costs beside its tokens: the step it is computed in makes a token for every
        stream too. The pace of streams holds some prefill, TTFT holds some waiting: the lower counts."""
        return min(self.pace.level, self.overhead) if self.pace.known else self.overhead

    @property
    def measured(self) -> float:
        """Tokens per second by the samples alone; the prior without any."""
        return _quantile(self._samples, _QUANTILE) if self._samples else self.prior

    def observe_first_token(
        self,
        own_work: float,
        ttft_s: float,
        backlog_at_decision: float,
        now: float,
        first_at: float | None = None,
    ) -> None:
        """A streamed request got its first token (at ``first_at``, if that was before ``now``); ``ttft_s`` counts from its
        first byte to the engine."""
        if not ttft_s > 0.0:
            return
        work = own_work + backlog_at_decision
        if work < _MIN_TOKENS:
            self._overheads.append(ttft_s)
            self.overhead = min(_quantile(self._overheads, 0.25), 1.0)
        elif own_work >= _MIN_TOKENS and backlog_at_decision <= own_work * _ALONE:
            came = now if first_at is None else first_at
            if came - ttft_s < self._alone_until:
                return
            self._alone_until = came
            # A TTFT near the overhead says little; at least a fifth of it is taken to be prefill.
            self._sample(work / max(ttft_s - self.step_s, ttft_s / 5, _SHORTEST_S), now)

    def observe_counters(self, computed_tokens: float, seconds: float, busy: bool, now: float) -> None:
        """The engine computed this many prompt tokens in the last ``seconds``; ``busy``: it was never out of
        prompts."""
        if not busy:
            self._busy_s = self._busy_tokens = 0.0
            return
        self._busy_s += seconds
        self._busy_tokens += computed_tokens
        # Engines count a prompt when it is done: over a short time the counter moves in lumps.
        if self._busy_s >= _BUSY_S and self._busy_tokens >= _MIN_TOKENS:
            self._sample(self._busy_tokens / self._busy_s, now)
            self._busy_s = self._busy_tokens = 0.0

    def observe_least(self, rate: float, now: float) -> None:
        """The engine computed so much work a second, whether it was ever idle or not."""
        if rate > self.prefill:
            self._sample(rate, now)

    def observe_completion(self, duration_s: float, ttft_s: float | None, active: float, now: float) -> None:
        """A request ended well. ``ttft_s`` only if streamed; ``active``: streams here, it included, as it
        ended."""
        if not duration_s >= 0.0:
            return
        service = max(duration_s - ttft_s, 0.0) if ttft_s is not None else duration_s
        self.service += (min(service, 3600.0) - self.service) / 16
        last, self._last_completion = self._last_completion, now
        if last is not None and active > 1:
            self._gaps = min(self._gaps + 1, 16)
            self._gap += (max(now - last, 0.0) - self._gap) / self._gaps

    def observe_decode(
        self, seconds: float, generated_tokens: float, computed_tokens: float, running: float
    ) -> None:
        """Engine counters of the last ``seconds`` with so many streams running on average.

        See :mod:`extproc.fleet.pace`.
        """
        decoding = seconds - computed_tokens / self.prefill
        if running >= 1.0 and generated_tokens >= _MIN_GENERATED and decoding > seconds / 3:
            self.pace.observe(running * decoding / generated_tokens, running)

    def observe_match(self, expected_tokens: float, cached_tokens: float, now: float) -> None:
        """Usage said how many prompt tokens were cached where we expected so many."""
        if expected_tokens >= _MIN_TOKENS and cached_tokens >= 0:
            share = min(cached_tokens / expected_tokens, 1.0)
            self._trust = self.match_trust(now)
            self._trust += (share - self._trust) / 8
            self._trust_at = now

    def match_trust(self, now: float) -> float:
        """Share of expected cached tokens that are there; forgotten towards 1 without news."""
        if self._trust >= 0.999:
            return 1.0
        return float(1.0 - (1.0 - self._trust) * 0.5 ** (max(now - self._trust_at, 0.0) / (4 * _HALF_LIFE_S)))

    def completion_interval(self, active: float) -> float:
        """Seconds until the next completion with this many active streams (Little's law until gaps are
        known)."""
        by_service = self.service / max(active, 1.0)
        return self._gap if self._gaps >= 8 else by_service

    def _sample(self, rate: float, now: float) -> None:
        if now - self._sampled_at > _HALF_LIFE_S and rate > _RECOVERED * self.measured:
            self._samples.clear()
        self._samples.append(min(max(rate, self.prior / 100), self.prior * 100))
        self._sampled_at = now
        self._estimate(now)

    def _estimate(self, now: float) -> None:
        self._aged_at = now
        count = len(self._samples)
        if not count or not self.informed:
            self.prefill = self.prior
            return
        age = max(now - self._sampled_at, 0.0)
        weight = count / (count + _PRIOR_SAMPLES) * 0.5 ** (age / _HALF_LIFE_S)
        estimate = float(self.measured**weight * self.prior ** (1.0 - weight))
        self.prefill = beyond_noise(estimate, self.prior)
        if weight < 0.05:
            self._samples.clear()


def _quantile(samples: deque[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
