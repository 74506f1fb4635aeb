"""Half to three times what the engines can serve, in virtual time: three priorities with two tenants each.

The engines are the simulator's: prefill and decode share their steps, so even a request that waits for nothing starts
a little later on a busy engine. Load is in shares of what the engines serve at most; a fifth of it is critical.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from extproc.admission.policy import Policy
from extproc.limits.limit import Limit, LimitRules
from extproc.routing.tenant import Tenant
from extproc.simulator.profile import Profile
from tests.unit.virtual_gateway import Asked, VirtualGateway, poisson

PROFILE = Profile(
    prefill_tokens_per_s=40_000,
    decode_base_s=0.010,
    decode_per_seq_s=0.0001,
    kv_blocks=3000,
    max_num_batched_tokens=2048,
)
ENGINES, SLOTS, CAPACITY = 4, 24, 24.0
MAX_WAIT_S, SLO_S = 4.0, 5.0
SECONDS, WARM_S = 40.0, 5.0
POLICY = Policy(max_wait_s=MAX_WAIT_S, headroom=0.35, max_ttft_s=0.025)
KINDS = (("critical", 10, 0.2), ("standard", 0, 0.5), ("batch", -10, 0.3))


def arrivals(load: float, *, critical_only: bool = False) -> list[Asked]:
    tenants = [
        (Tenant(f"{name}-{n}", priority=priority), CAPACITY * load * share / 2, (500, 1500), (100, 300))
        for name, priority, share in KINDS
        if priority == 10 or not critical_only
        for n in (1, 2)
    ]
    return poisson(random.Random(7), tenants, SECONDS)


@cache
def served(load: float, *, critical_only: bool = False, shedding: bool = True) -> tuple[Asked, ...]:
    asked = arrivals(load, critical_only=critical_only)
    if shedding:
        VirtualGateway(ENGINES, PROFILE, SLOTS, policy=POLICY, highest=10).run(asked)
    else:
        VirtualGateway(ENGINES, PROFILE, None, queue=False).run(asked)
    return tuple(asked)


def p95_ttft(asked: tuple[Asked, ...]) -> float:
    times = sorted(one.ttft for one in asked if one.tenant.priority == 10)
    return times[int(len(times) * 0.95)]


def goodput(asked: tuple[Asked, ...]) -> float:
    """Requests a second that start in time, of those that come in the second half."""
    late = [one for one in asked if one.at >= SECONDS / 2]
    return sum(one.ttft <= SLO_S for one in late) / (SECONDS / 2)


LOADS = (0.5, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("load", LOADS)
def test_critical_requests_start_as_if_they_were_alone(load: float) -> None:
    assert p95_ttft(served(load)) <= 1.2 * p95_ttft(served(load, critical_only=True))


@pytest.mark.parametrize("load", [2.0, 3.0])
def test_the_lowest_priority_gets_its_share(load: float) -> None:
    tokens: Counter[int] = Counter()
    for one in served(load):
        if one.dispatched is not None and WARM_S <= one.dispatched <= SECONDS:
            tokens[one.tenant.priority] += one.prompt + one.output
    assert tokens[-10] >= 0.19 * sum(tokens.values())


@pytest.mark.parametrize("load", [2.0, 3.0])
def test_tenants_of_one_priority_are_served_alike(load: float) -> None:
    tokens: Counter[str] = Counter()
    for one in served(load):
        if one.dispatched is not None:
            tokens[one.tenant.name] += one.prompt + one.output
    for name, _, _ in KINDS:
        assert tokens[f"{name}-1"] == pytest.approx(tokens[f"{name}-2"], rel=0.15)


@pytest.mark.parametrize("load", LOADS)
def test_nobody_is_served_after_his_deadline(load: float) -> None:
    for one in served(load):
        assert one.dispatched is None or one.dispatched <= one.at + MAX_WAIT_S + 1e-9
        assert (one.dispatched is None) == bool(one.refused)


@pytest.mark.parametrize("load", LOADS)
def test_critical_requests_are_never_shed_for_others(load: float) -> None:
    assert not [one for one in served(load) if one.refused and one.tenant.priority == 10]


def test_goodput_stays_at_its_peak_with_shedding_and_collapses_without() -> None:
    with_shedding = [goodput(served(load)) for load in LOADS]
    assert with_shedding[-1] >= 0.9 * max(with_shedding)
    without = [goodput(served(load, shedding=False)) for load in LOADS]
    assert without[-1] < 0.1 * max(with_shedding)


TPM = 60_000.0
LIMITED = Tenant("limited")


def limited_tokens(*, usage_share: float) -> tuple[float, float]:
    """Tokens really used in ten minutes under a limit that is asked for three times over, and what the limit allows."""
    asked = poisson(random.Random(3), [(LIMITED, 3.0, (200, 1200), (50, 450))], 600.0)
    limits = LimitRules(tenants={"limited": Limit(tpm=TPM)})
    world = VirtualGateway(
        ENGINES, PROFILE, SLOTS, limits=limits, usage=lambda rng: rng.random() < usage_share
    )
    world.run(asked)
    used = sum(one.prompt + one.output for one in asked if one.dispatched is not None)
    return used, TPM + TPM / 60 * asked[-1].at


def test_tokens_admitted_are_within_a_hundredth_of_the_limit_where_usage_is_known() -> None:
    used, allowed = limited_tokens(usage_share=1.0)
    assert used == pytest.approx(allowed, rel=0.01)


def test_tokens_admitted_are_within_a_tenth_where_usage_is_mostly_not_known() -> None:
    used, allowed = limited_tokens(usage_share=0.1)
    assert used == pytest.approx(allowed, rel=0.1)
