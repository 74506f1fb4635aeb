"""Whether an endpoint has room for one more request.

Rules of this file:

- an endpoint without open leases of ours always has room: nothing may wait for ever;
- ``max_concurrency`` bounds open leases; a predicted wait for the first token (backlog over prefill rate) and the KV
  cache's use bound the rest, where the policy asks and the engine tells. What it does not tell bounds nothing;
- a share of every bound (``headroom``) is for requests of the highest priority.
"""

from __future__ import annotations

from extproc.admission.policy import Policy
from extproc.fleet.endpoint import Endpoint

_TRUSTED = 0.5


class Room:
    """The question for one policy, at one moment, for one class of requests."""

    __slots__ = ("_kv", "_now", "_share", "_ttft")

    def __init__(self, policy: Policy, now: float, *, highest: bool) -> None:
        self._share = 1.0 if highest else 1.0 - policy.headroom
        self._ttft = None if policy.max_ttft_s is None else policy.max_ttft_s * self._share
        self._kv = policy.max_kv_usage
        self._now = now

    def has(self, endpoint: Endpoint) -> bool:
        """See the rules above."""
        leases = endpoint.leases
        if not leases:
            return True
        bound = endpoint.spec.max_concurrency
        if bound is not None and leases >= max(bound * self._share, 1.0):
            return False
        if (
            self._ttft is not None
            and endpoint.backlog.level > 0.0
            and predicted_ttft(endpoint, self._now) > self._ttft
        ):
            return False
        if self._kv is None:
            return True
        state = endpoint.state
        usage = None if state is None else state.kv_usage
        if usage is None or not 0.0 <= usage <= 1.0:
            return True
        if endpoint.backlog.level > 0.0 and (tokens := endpoint.kv_tokens):
            usage += endpoint.backlog.tokens(self._now, endpoint.rates.prefill_at(self._now)) / tokens
        return usage < self._kv or endpoint.trust(self._now) < _TRUSTED


def predicted_ttft(endpoint: Endpoint, now: float) -> float:
    """Seconds until the engine has prefilled what was given to it: a new request's own prefill comes after that."""
    rate = endpoint.rates.prefill_at(now)
    return endpoint.backlog.tokens(now, rate) / rate
