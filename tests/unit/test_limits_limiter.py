"""All or nothing over every scope, and nothing lost or gained whatever happens to requests."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.limits.bucket import day_of
from extproc.limits.headers import rate_headers, refused
from extproc.limits.limit import Limit, LimitRules
from extproc.limits.limiter import Limiter, Refusal, Reservation
from extproc.limits.tally import ReplySizes, used_tokens
from extproc.outcome import Usage
from extproc.routing.tenant import Tenant

ACME = Tenant("acme")
RULES = LimitRules(
    everything=Limit(rpm=600, tpm=100_000),
    models={"m": Limit(tpm=10_000)},
    tenants={"acme": Limit(rpm=60, tpm=6000, tokens_per_day=50_000, concurrency=2)},
    tenant_models={("acme", "m"): Limit(tpm=3000)},
    routes={"r": Limit(rpm=30)},
    client=Limit(rpm=10),
)


def reserve(limiter: Limiter, tokens: float, now: float = 0.0, client: str = "") -> Reservation | Refusal:
    return limiter.reserve(limiter.meters(ACME, "m", "r", client, now), tokens, now)


def test_a_request_counts_in_every_scope_that_has_a_limit() -> None:
    keys = [meter.key for meter in Limiter(RULES).meters(ACME, "m", "r", "10.0.0.1", 0.0)]
    assert keys == [
        ("tenant", "acme"),
        ("tenant_model", "acme/m"),
        ("route", "r"),
        ("model", "m"),
        ("global", ""),
        ("client", "10.0.0.1"),
    ]
    assert [meter.key for meter in Limiter(RULES).meters(Tenant("x"), "n", "s", "", 0.0)] == [("global", "")]


def test_a_refusal_takes_nothing_anywhere_and_names_the_limit_that_lasts_longest() -> None:
    limiter = Limiter(RULES)
    assert isinstance(reserve(limiter, 2500), Reservation)
    meters = limiter.meters(ACME, "m", "r", "", 0.0)
    before = [
        (meter.requests and meter.requests.left(0.0), meter.tokens and meter.tokens.left(0.0))
        for meter in meters
    ]
    refusal = reserve(limiter, 2500)
    assert isinstance(refusal, Refusal)
    assert (refusal.key, refusal.kind, refusal.retry_after_s) == (("tenant_model", "acme/m"), "tokens", 40.0)
    after = [
        (meter.requests and meter.requests.left(0.0), meter.tokens and meter.tokens.left(0.0))
        for meter in meters
    ]
    assert before == after
    assert isinstance(reserve(limiter, 2500, now=40.0), Reservation)


def test_parallel_requests_cannot_pass_together_what_each_could_alone() -> None:
    limiter = Limiter(LimitRules(tenants={"acme": Limit(tpm=100)}))
    got = [reserve(limiter, 80) for _ in range(5)]
    assert sum(isinstance(one, Reservation) for one in got) == 1


def test_requests_and_tokens_are_counted_apart() -> None:
    """500,000 tokens a minute beside a limit of requests: refusals begin at the tokens, not at 65 % of them."""
    limiter = Limiter(LimitRules(tenants={"acme": Limit(rpm=10_000, tpm=500_000)}))
    passed = 0
    while isinstance(reserve(limiter, 1000), Reservation):
        passed += 1000
    assert passed == 500_000


def test_settling_corrects_and_refunding_gives_all_back_once() -> None:
    limiter = Limiter(LimitRules(tenants={"acme": Limit(rpm=60, tpm=6000, tokens_per_day=10_000)}))
    (meter,) = limiter.meters(ACME, "m", "r", "", 0.0)
    assert meter.requests is not None
    assert meter.tokens is not None
    assert meter.day is not None
    one, two = reserve(limiter, 1000), reserve(limiter, 1000)
    assert isinstance(one, Reservation)
    assert isinstance(two, Reservation)
    one.settle(200, 0.0)
    assert (meter.requests.left(0.0), meter.tokens.left(0.0), meter.day.used) == (58, 4800, 1200)
    two.refund(0.0)
    two.refund(0.0)
    two.settle(5000, 0.0)
    assert (meter.requests.left(0.0), meter.tokens.left(0.0), meter.day.used) == (59, 5800, 200)


def test_a_reload_keeps_what_was_used_and_open_reservations() -> None:
    limiter = Limiter(LimitRules(tenants={"acme": Limit(tpm=6000)}))
    open_one = reserve(limiter, 1000)
    limiter.install(LimitRules(tenants={"acme": Limit(tpm=12_000)}), 0.0)
    (meter,) = limiter.meters(ACME, "m", "r", "", 0.0)
    assert meter.tokens is not None
    assert meter.tokens.left(0.0) == 11_000
    assert isinstance(open_one, Reservation)
    open_one.refund(0.0)
    assert meter.tokens.left(0.0) == 12_000


def test_addresses_are_capped_and_running_ones_stay() -> None:
    limiter = Limiter(LimitRules(client=Limit(concurrency=1)), max_clients=3)
    (running,) = limiter.meters(ACME, "m", "r", "10.0.0.1", 0.0)
    running.running = 1
    for n in range(2, 10):
        limiter.meters(ACME, "m", "r", f"10.0.0.{n}", 0.0)
    assert limiter.clients == 3
    assert limiter.meters(ACME, "m", "r", "10.0.0.1", 0.0) == (running,)


def test_days_survive_a_restart() -> None:
    rules = LimitRules(tenants={"acme": Limit(tokens_per_day=1000)})
    first = Limiter(rules)
    first.wall_offset = 1.7e9
    assert isinstance(reserve(first, 900), Reservation)
    second = Limiter(rules)
    second.wall_offset = 1.7e9
    second.restore_days(first.used_today(day_of(1.7e9)))
    assert isinstance(reserve(second, 200), Refusal)
    assert isinstance(reserve(second, 100), Reservation)


def test_the_tightest_limit_is_shown_and_the_refusal_tells_when() -> None:
    limiter = Limiter(RULES)
    reserve(limiter, 1500)
    meters = limiter.meters(ACME, "m", "r", "", 0.0)
    assert dict(rate_headers(meters, 0.0)) == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "29",
        "x-ratelimit-reset-requests": "2s",
        "x-ratelimit-limit-tokens": "3000",
        "x-ratelimit-remaining-tokens": "1500",
        "x-ratelimit-reset-tokens": "30s",
    }
    rejection = refused(Refusal(("tenant", "acme"), "tokens", 12.3, 6000.0))
    assert (rejection.status, rejection.code, rejection.retry_after_s) == (429, "rate_limit_exceeded", 12.3)
    assert (
        rejection.message == "Rate limit of tenant `acme` reached: 6000 tokens per minute. Try again in 13 s."
    )


def test_usage_goes_before_bytes_and_bytes_before_the_estimate() -> None:
    sizes = ReplySizes()
    assert sizes.tokens("m", True, 1000) is None
    for _ in range(5):
        sizes.observe("m", True, 20_000, 100)
    by_bytes = sizes.tokens("m", True, 10_000)
    assert by_bytes == pytest.approx(50)
    assert sizes.tokens("m", False, 10_000) is None
    estimate = {"prompt_tokens": 10.0, "output_tokens": 256.0}
    assert used_tokens(Usage(12, 34), **estimate, reply_tokens=by_bytes) == 46
    assert used_tokens(None, **estimate, reply_tokens=by_bytes) == pytest.approx(60)
    assert used_tokens(None, **estimate, reply_tokens=None) == 266
    assert used_tokens(Usage(12, None), **estimate, reply_tokens=by_bytes) == pytest.approx(62)


class Conservation(RuleBasedStateMachine):
    """Time stands still: what is left and what is held or used always make the whole, in every scope."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter(LimitRules(everything=Limit(rpm=6000, tpm=50_000), tenants=self.tenants(9000)))
        self.open: list[tuple[Reservation, str]] = []
        self.tokens = {"a": 0.0, "b": 0.0}
        self.requests = {"a": 0, "b": 0}

    @staticmethod
    def tenants(tpm: float) -> dict[str, Limit]:
        return {name: Limit(rpm=600, tpm=tpm, tokens_per_day=20_000) for name in ("a", "b")}

    @rule(name=st.sampled_from("ab"), tokens=st.integers(1, 5000))
    def arrive(self, name: str, tokens: int) -> None:
        got = self.limiter.reserve(self.meters(name), tokens, 0.0)
        if isinstance(got, Reservation):
            self.open.append((got, name))
            self.tokens[name] += tokens
            self.requests[name] += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), used=st.integers(0, 6000))
    def succeed(self, data: st.DataObject, used: int) -> None:
        got, name = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        got.settle(used, 0.0)
        self.tokens[name] += used - got.tokens

    @precondition(lambda self: self.open)
    @rule(data=st.data(), twice=st.booleans())
    def fail_or_leave(self, data: st.DataObject, twice: bool) -> None:
        got, name = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        got.refund(0.0)
        if twice:
            got.settle(1234, 0.0)
        self.tokens[name] -= got.tokens
        self.requests[name] -= 1

    @rule(tpm=st.sampled_from([3000.0, 9000.0, 30_000.0]))
    def reload(self, tpm: float) -> None:
        self.limiter.install(
            LimitRules(everything=Limit(rpm=6000, tpm=50_000), tenants=self.tenants(tpm)), 0.0
        )

    def meters(self, name: str):  # type: ignore[no-untyped-def]
        return self.limiter.meters(Tenant(name), "m", "", "", 0.0)

    @invariant()
    def nothing_is_lost_or_gained(self) -> None:
        for name in "ab":
            own, everything = self.meters(name)
            assert own.tokens.capacity - own.tokens.left(0.0) == pytest.approx(self.tokens[name], abs=1e-6)
            assert own.requests.capacity - own.requests.left(0.0) == pytest.approx(
                self.requests[name], abs=1e-6
            )
            assert own.day.used == pytest.approx(self.tokens[name], abs=1e-6)
            total = everything.tokens.capacity - everything.tokens.left(0.0)
            assert total == pytest.approx(sum(self.tokens.values()), abs=1e-6)


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400), st.integers(0, 800)), max_size=80))
def test_over_time_tokens_stay_within_the_limit(steps: list[tuple[float, int, int]]) -> None:
    limiter = Limiter(LimitRules(tenants={"acme": Limit(tpm=6000)}))
    now, used, largest = 0.0, 0.0, 0.0
    for elapsed, estimate, actual in steps:
        now += elapsed
        got = reserve(limiter, estimate, now)
        if isinstance(got, Reservation):
            got.settle(actual, now)
            used += actual
            largest = max(largest, actual)
    assert used <= 6000 + 100 * now + largest + 1e-3
