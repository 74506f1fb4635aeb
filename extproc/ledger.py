"""Request id -> lease. Opened in the same step as the decision, closed exactly once.

Rules of this file:

    event             | known id                                   | unknown id
    ------------------+--------------------------------------------+--------------------------------------------
    open              | (ids are unique: the old lease is dropped) | lease opened, endpoint charged
    failed attempt    | health hears it; lease moves to its next   | health hears it
                      | endpoint (claim undone and made there)     |
    renewal           | renewed; first token noted                 | adopted: a lease without claim or prompt
    KV events         | whose last block they told of: the prompt  | (by endpoint)
                      | is computed, the first token has come      |
    end               | moved to the endpoint that served, settled | if an engine was asked: counted as unknown,
                      |                                            | health hears it
    drop              | closed, nothing learned                    | nothing
    sweep             | no sign of life for ``dead_after_s``:      |
                      | closed, nothing learned                    |

A closed id is remembered for a while, so that records that arrive late or twice are told from unknown ones. A broken
attempt and the final record that repeats its failure come by separate streams in any order: an endpoint is blamed once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import islice

from extproc.api.request import Api
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.fleet import Fleet
from extproc.fleet.prefill import work
from extproc.fleet.retry_budget import RetryBudget
from extproc.kvcache.view import CacheView, Claim, Look
from extproc.limits.limiter import Meter, Reserved
from extproc.outcome import End, FailedAttempt, Outcome, Renewal, Usage, classify

_ASKED = 32
"""Leases that one message of KV events is compared with."""


@dataclass(slots=True)
class Lease:
    """One request's claim on one endpoint, from decision to settlement. Tokens are estimates until usage is known."""

    id: str
    endpoint: Endpoint
    opened_at: float
    pool: str = ""
    version: str = ""
    model: str = ""
    adapter: str = ""
    """LoRA adapter, if any."""
    tenant: str = ""
    route: str = ""
    api: Api = Api.OTHER
    stream: bool = False
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    attention: float = 0.0
    """Attention's share in prefill, as believed at the decision."""
    work: float = 0.0
    """What was charged to the backlog of the endpoint that prefills (:mod:`extproc.fleet.prefill`)."""
    output_tokens: int = 0
    """Expected output."""
    fallbacks: tuple[Endpoint, ...] = ()
    """Where Envoy goes next, in order, if the endpoint fails."""
    session: str = ""
    look: Look | None = None
    claim: Claim | None = None
    prefiller: Endpoint | None = None
    """Where the prompt is prefilled, if not on the endpoint that answers."""
    prefiller_tokens: int = 0
    """What it must compute."""
    prefill_claim: Claim | None = None
    backlog_at_open: float = 0.0
    """Tokens that were to be prefilled before this request, at the decision."""
    renewed_at: float = 0.0
    started: bool = False
    """The first token is known to have come."""
    timed: bool = False
    """A record has said when it came."""
    attempts: int = 1
    arm: str = ""
    """Version that a running release chose for this request; empty: no release, or a tester's own choice."""
    adopted: bool = False
    """Decided by an earlier process of ours: nothing is known of its prompt."""
    retry_busy: bool = False
    """Envoy may send it again on a busy answer: the pool's retry budget allowed it."""
    blamed: Endpoint | None = None
    """The endpoint whose failure or busy answer on this request health has already heard."""
    generation: int = 0
    """The endpoint's generation at opening: a claim on an emptied cache is not undone."""
    meters: Sequence[Meter] = ()
    """Limits in which the request counts as running."""
    reserved: Reserved | None = None
    """Its part of the limits, closed when the lease is."""
    waited_s: float = 0.0
    """Time in our queue."""
    turn: tuple[int, str, float] | None = None
    """Priority, flow and tokens that the queue counted for it; None when it did not wait."""

    @property
    def computing(self) -> tuple[Endpoint, int]:
        """Who prefills the prompt, and how many tokens of it."""
        if self.prefiller is not None:
            return self.prefiller, self.prefiller_tokens
        return self.endpoint, self.uncached_tokens


@dataclass(slots=True)
class Settlement:
    """How a lease ended; ``end`` is None when no final record came (dropped or dead). Never changed."""

    lease: Lease
    outcome: Outcome
    reason: str
    end: End | None = None
    active: int = 0
    """Open leases on the endpoint as this one ended, it included."""


@dataclass(slots=True)
class LedgerCounts:
    """Running totals, read by the metrics."""

    opened: int = 0
    closed: int = 0
    adopted: int = 0
    dead: int = 0
    dropped: int = 0
    moved: int = 0
    late: int = 0
    unknown: int = 0
    failed_attempts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(endpoint key, reason) -> count."""


class Ledger:
    """Open leases. ``on_settled`` hears every closed lease exactly once."""

    def __init__(
        self,
        fleet: Fleet,
        view: CacheView,
        *,
        dead_after_s: float = 180.0,
        remembered: int = 20_000,
        on_settled: Callable[[Settlement, float], None] = lambda settlement, now: None,
    ) -> None:
        self.leases: dict[str, Lease] = {}
        self.counts = LedgerCounts()
        self.retries = RetryBudget()
        self.on_settled = on_settled
        self._fleet = fleet
        self._view = view
        self._dead_after_s = dead_after_s
        self._closed: OrderedDict[str, Endpoint | None] = OrderedDict()
        self._remembered = remembered
        self._awaited: dict[int, dict[str, Lease]] = {}
        """Slot -> leases whose prompt its KV events will tell of."""

    def open(self, lease: Lease, now: float) -> Lease:
        """Charge the lease to its endpoint."""
        stale = self.leases.get(lease.id)
        if stale is not None:
            self._close(stale, Outcome.NEUTRAL, "replaced", None, now)
        lease.renewed_at = now
        self.leases[lease.id] = lease
        self.counts.opened += 1
        self._charge(lease, now)
        return lease

    def attempt_failed(self, event: FailedAttempt, now: float) -> None:
        """An attempt failed: tell health, and follow Envoy to the lease's next endpoint."""
        endpoint = self._fleet.find(event.cluster, event.address)
        outcome, reason = classify(event.status, event.flags)
        lease = self.leases.get(event.request_id)
        if endpoint is not None:
            key = (endpoint.key, reason)
            self.counts.failed_attempts[key] = self.counts.failed_attempts.get(key, 0) + 1
            blamed = lease.blamed if lease is not None else self._closed.get(event.request_id)
            if blamed is not endpoint:
                _tell_health(endpoint, outcome, reason, now)
        if lease is None:
            if endpoint is not None and reason == "connect_failure" and event.request_id in self._closed:
                self.retries.refund(endpoint.spec.pool)
            return
        if lease.fallbacks and lease.retry_busy and reason != "connect_failure":
            self.retries.spend(lease.pool)
        if _speaks(outcome, reason):
            lease.blamed = endpoint
        lease.attempts += 1
        if lease.fallbacks and (endpoint is None or endpoint is lease.endpoint):
            self._move(lease, lease.fallbacks[0], now)

    def renewed(self, event: Renewal, now: float) -> None:
        """A running request is alive. Unknown ones are adopted: an earlier process of ours decided them."""
        lease = self.leases.get(event.request_id)
        endpoint = self._fleet.find(event.cluster, event.address)
        if lease is None:
            if event.request_id in self._closed:
                self.counts.late += 1
            elif endpoint is not None:
                adopted = Lease(
                    event.request_id, endpoint, now, pool=endpoint.spec.pool, adopted=True, started=True
                )
                adopted.version = endpoint.spec.version
                self.counts.adopted += 1
                self.open(adopted, now)
            else:
                self.counts.unknown += 1
            return
        lease.renewed_at = now
        if endpoint is not None and endpoint is not lease.endpoint:
            self._move(lease, endpoint, now)
        if event.ttft_s is not None and not lease.timed:
            self._first_token(lease, event.ttft_s, now)

    def told(self, slot: int, now: float) -> None:
        """KV events of the slot's engine were taken: prompts they told of no longer wait. vLLM tells of a block after the
        step that computed it. The oldest are asked about: engines compute prompts in order of arrival."""
        for lease in list(islice(self._awaited.get(slot, {}).values(), _ASKED)):
            claim = lease.claim if lease.prefiller is None else lease.prefill_claim
            if claim is not None and claim.told:
                self._start(lease, now, now)

    def ended(self, event: End, now: float) -> Settlement | None:
        """The final record. Returns the settlement, or None for an id that is not open."""
        outcome, reason = classify(event.status, event.flags)
        served_by = self._fleet.find(event.cluster, event.address) if event.cluster else None
        lease = self.leases.get(event.request_id)
        if lease is None:
            if event.request_id in self._closed:
                self.counts.late += 1
            elif event.address:
                # Without an address no engine was asked: the client left before the decision.
                self.counts.unknown += 1
                if served_by is not None:
                    _tell_health(served_by, outcome, reason, now)
            return None
        if served_by is None and reason == "no_host":
            served_by = lease.endpoint  # Envoy names no cluster then
        if event.attempts > lease.attempts:
            # Records of attempts that are still to come: taken for busy answers until they say otherwise.
            if lease.retry_busy:
                self.retries.spend(lease.pool, event.attempts - lease.attempts)
            lease.attempts = event.attempts
        if served_by is not None and served_by is not lease.endpoint:
            self._move(lease, served_by, now)
        if event.ttft_s is not None and outcome is not Outcome.FAILURE and not lease.timed:
            self._first_token(lease, event.ttft_s, now, event.usage)
        if served_by is not None and not (_speaks(outcome, reason) and lease.blamed is served_by):
            _tell_health(served_by, outcome, reason, now)
            if _speaks(outcome, reason):
                lease.blamed = served_by
        return self._close(lease, outcome, reason, event, now)

    def drop(self, request_id: str, now: float, reason: str = "dropped") -> None:
        """The client left before Envoy had our answer: the request reaches no engine."""
        lease = self.leases.get(request_id)
        if lease is not None:
            self.counts.dropped += 1
            self._close(lease, Outcome.NEUTRAL, reason, None, now)

    def sweep(self, now: float) -> int:
        """Close leases without a sign of life; returns how many."""
        dead = [lease for lease in self.leases.values() if now - lease.renewed_at > self._dead_after_s]
        for lease in dead:
            self.counts.dead += 1
            self._close(lease, Outcome.NEUTRAL, "dead", None, now)
        return len(dead)

    def give_up(self, lease: Lease, now: float, reason: str) -> None:
        """Close a lease whose ending will not be heard any more."""
        self.counts.dead += 1
        self._close(lease, Outcome.NEUTRAL, reason, None, now)

    def forget(self, live: Container[str]) -> None:
        """Drop counts of endpoints that are gone."""
        counts = self.counts.failed_attempts
        for key in [key for key in counts if key[0] not in live]:
            del counts[key]

    def _charge(self, lease: Lease, now: float) -> None:
        endpoint = lease.endpoint
        lease.generation = endpoint.generation
        lease.backlog_at_open = endpoint.backlog.tokens(now, endpoint.rates.prefill_at(now))
        endpoint.leases += 1
        if lease.adapter:
            endpoint.adapter_leased(lease.adapter, 1)
        if lease.look is not None:
            lease.claim = self._view.claim(endpoint, lease.look)
            if lease.prefiller is not None:
                lease.prefill_claim = self._view.claim(lease.prefiller, lease.look)
        if not lease.started:
            computing, tokens = lease.computing
            rate = computing.rates.prefill_at(now)
            lease.work = work(tokens, lease.prompt_tokens - tokens, lease.attention)
            lease.work += computing.rates.step_s * rate
            computing.backlog.add(lease.work, now, rate, tokens)
            claim = lease.claim if lease.prefiller is None else lease.prefill_claim
            if claim is not None and claim.awaited:
                self._awaited.setdefault(computing.slot, {})[lease.id] = lease

    def _discharge(self, lease: Lease, now: float) -> None:
        lease.endpoint.leases -= 1
        if lease.adapter:
            lease.endpoint.adapter_leased(lease.adapter, -1)
        if not lease.started:
            self._start(lease, now)

    def _start(self, lease: Lease, now: float, started_at: float | None = None) -> None:
        computing, _ = lease.computing
        lease.started = True
        awaited = self._awaited.get(computing.slot)
        if awaited is not None and awaited.pop(lease.id, None) is not None and not awaited:
            del self._awaited[computing.slot]
        computing.backlog.remove(lease.work, now, computing.rates.prefill_at(now), started_at)

    def _first_token(self, lease: Lease, ttft_s: float, now: float, usage: Usage | None = None) -> None:
        lease.timed = True
        if lease.stream and not lease.adopted and lease.attempts == 1 and lease.prefiller is None:
            uncached, cached = lease.uncached_tokens, lease.prompt_tokens - lease.uncached_tokens
            if usage is not None and usage.input is not None and usage.cached is not None:
                uncached, cached = max(usage.input - usage.cached, 0), usage.cached
            own = work(uncached, cached, lease.attention)
            first_at = lease.opened_at + ttft_s
            lease.endpoint.rates.observe_first_token(own, ttft_s, lease.backlog_at_open, now, first_at)
            if not lease.started:
                self._start(lease, now, first_at)
        elif not lease.started:
            self._start(lease, now)

    def _move(self, lease: Lease, endpoint: Endpoint, now: float) -> None:
        self.counts.moved += 1
        self._undo_claim(lease)
        self._discharge(lease, now)
        lease.started = lease.timed = False
        lease.endpoint = endpoint
        lease.version = endpoint.spec.version
        lease.fallbacks = tuple(other for other in lease.fallbacks if other is not endpoint)
        if lease.look is not None:
            lease.uncached_tokens = max(lease.prompt_tokens - self._view.held(endpoint, lease.look), 0)
        self._charge(lease, now)

    def _undo_claim(self, lease: Lease) -> None:
        if lease.claim is not None and lease.generation == lease.endpoint.generation:
            lease.claim.undo()
        lease.claim = None
        if lease.prefill_claim is not None:
            lease.prefill_claim.undo()
            lease.prefill_claim = None

    def _close(self, lease: Lease, outcome: Outcome, reason: str, end: End | None, now: float) -> Settlement:
        settlement = Settlement(lease, outcome, reason, end, lease.endpoint.leases)
        del self.leases[lease.id]
        self._closed[lease.id] = lease.blamed
        if len(self._closed) > self._remembered:
            self._closed.popitem(last=False)
        try:
            if not lease.started and not (end is not None and outcome is Outcome.SUCCESS):
                self._undo_claim(lease)
            elif lease.claim is not None:
                lease.claim.keep()
                if lease.prefill_claim is not None:
                    lease.prefill_claim.keep()
        finally:
            self._discharge(lease, now)
            self.counts.closed += 1
        self.on_settled(settlement, now)
        return settlement


def _speaks(outcome: Outcome, reason: str) -> bool:
    """Whether an ending says something against the endpoint: such a word is told once a request."""
    return outcome is Outcome.FAILURE or reason == "busy"


def _tell_health(endpoint: Endpoint, outcome: Outcome, reason: str, now: float) -> None:
    health = endpoint.health
    if outcome is Outcome.SUCCESS:
        health.succeeded(now)
    elif outcome is Outcome.FAILURE:
        health.failed(now, connect=reason in ("connect_failure", "no_host"))
    elif reason == "busy":
        health.busied(now)
    elif reason == "client_error":
        health.heard(now)
