"""The driver: same seed same run, nobody gets lost, faults do what they say, the core hears what it would hear."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.replay.arrival import Arrival, unique_blocks
from extproc.replay.driver import Driver
from extproc.replay.errors import ReplayError
from extproc.replay.faults import Fault, parse_fault
from extproc.replay.policies import COMPARED, parse_policy
from extproc.replay.result import Run
from extproc.replay.setup import Setup, fleet, resolution_of
from extproc.replay.waiting import parse_admission
from extproc.replay.workload import generate, load_workload


def arrivals(count: int = 60, rate: float = 6.0, name: str = "chat") -> list[Arrival]:
    return generate(load_workload(name), count, rate, 1)


def setup(count: int = 3, **others: object) -> Setup:
    return replace(Setup(fleet(count, ["llama-8b-a100"])), **others)


def run(policy: str = "round-robin", stage: Setup | None = None, trace: list[Arrival] | None = None) -> Run:
    return Driver(arrivals() if trace is None else trace, stage or setup(), parse_policy(policy)).run()


@pytest.mark.parametrize("policy", COMPARED)
def test_every_policy_serves_every_request_and_again_the_same_way(policy: str) -> None:
    trace = arrivals(40)
    first, second = run(policy, trace=trace), run(policy, trace=trace)
    assert [row.id for row in first.served] == [arrival.id for arrival in trace]
    assert all(row.ok for row in first.served)
    assert first.served == second.served


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5), st.integers(0, 1000), st.sampled_from(["expected-latency", "aibrix-prefix", "random"])
)
def test_no_request_is_lost_or_answered_before_it_came(engines: int, seed: int, policy: str) -> None:
    rng = random.Random(seed)
    trace = [
        Arrival(
            str(at),
            at * 0.1,
            tokens := rng.randrange(1, 3000),
            rng.randrange(0, 60),
            unique_blocks(tokens),
            1,
        )
        for at in range(25)
    ]
    result = Driver(trace, setup(engines, seed=seed), parse_policy(policy)).run()
    assert len(result.served) == len(trace)
    for row in result.served:
        assert row.ttft_s is not None
        assert row.e2e_s is not None
        assert 0.0 < row.ttft_s <= row.e2e_s


def test_a_prompt_seen_before_is_found_in_the_cache() -> None:
    names = list(range(16))
    trace = [Arrival(str(at), at * 5.0, 1024, 4, names, 64) for at in range(2)]
    first, second = run("longest-match", trace=trace).served
    assert first.cached_tokens == 0
    assert second.cached_tokens == 960
    assert second.ttft_s is not None
    assert first.ttft_s is not None
    assert second.ttft_s < first.ttft_s / 2


def test_an_answer_is_found_by_the_next_turn() -> None:
    names = list(range(40))
    trace = [Arrival("0", 0.0, 640, 640, names[:20], 64), Arrival("1", 60.0, 2000, 4, names, 64)]
    assert run("longest-match", trace=trace).served[1].cached_tokens >= 1216


def test_a_slow_engine_is_slow_for_its_time_only() -> None:
    trace = [Arrival(str(at), at * 10.0, 4096, 4, unique_blocks(8), 512) for at in range(3)]
    fault = Fault("slow", 0, 5.0, 5.0, 10.0)
    rows = run(stage=setup(1, faults=(fault,)), trace=trace).served
    before, during, after = (row.ttft_s or 0.0 for row in rows)
    assert during == pytest.approx(5 * before, rel=0.2)
    assert after == pytest.approx(before, rel=0.2)


def test_requests_to_a_dead_engine_go_to_their_fallback() -> None:
    result = run(stage=setup(3, faults=(Fault("down", 1, at_s=0.0),)))
    assert all(row.ok for row in result.served)
    assert result.requests_per_engine[1] == 0


def test_a_dying_engine_breaks_streams_and_passes_on_what_has_not_begun() -> None:
    trace = [
        Arrival("streaming", 0.0, 64, 2000, unique_blocks(1), 64),
        Arrival("elsewhere", 0.5, 64, 4, unique_blocks(1), 64),
        Arrival("waiting", 1.0, 60_000, 4, unique_blocks(118), 512),
    ]
    result = run(stage=setup(2, faults=(Fault("down", 0, at_s=1.5),)), trace=trace)
    streaming, elsewhere, waiting = result.served
    assert (streaming.status, elsewhere.status, waiting.status) == (503, 200, 200)
    assert streaming.ttft_s is None
    assert waiting.engine == 1


def test_an_engine_that_comes_back_has_forgotten() -> None:
    names = list(range(16))
    trace = [Arrival(str(at), at * 10.0, 1024, 4, names, 64) for at in range(2)]
    stage = setup(1, faults=(Fault("down", 0, at_s=5.0, for_s=1.0),))
    assert run(stage=stage, trace=trace).served[1].cached_tokens == 0


@pytest.mark.parametrize("kind", ["frozen-metrics", "no-metrics"])
def test_the_default_lives_without_metrics(kind: str) -> None:
    blind = run("expected-latency", setup(3, faults=(Fault(kind),)))
    assert all(row.ok for row in blind.served)
    assert blind.max_over_mean_load < 2.0


def test_a_prompt_that_no_engine_can_hold_is_refused_and_counted() -> None:
    trace = [Arrival("0", 0.0, 100_000, 4, unique_blocks(196), 512)]
    stage = Setup(fleet(2, ["llama-8b-a100"], kv_tokens=50_000))
    result = run(stage=stage, trace=trace)
    assert result.served[0].status == 400
    assert result.summary()["failed"] == 1


def test_one_request_is_explained() -> None:
    driver = Driver(arrivals(20), setup(), parse_policy("expected-latency"), explain="7")
    record = driver.run().explained
    assert record is not None
    assert record["id"] == "7"
    assert len(record["candidates"]) == 3  # type: ignore[arg-type]
    assert record["outcome"]["outcome"] == "success"  # type: ignore[index]


def test_long_streams_are_renewed_and_keep_their_lease() -> None:
    trace = [Arrival("0", 0.0, 64, 40_000, unique_blocks(1), 64)]
    driver = Driver(trace, setup(1), parse_policy("least-requests"))
    result = driver.run()
    assert result.served[0].e2e_s is not None
    assert result.served[0].e2e_s > 200
    assert driver._core.ledger.counts.dead == 0
    assert driver._core.ledger.leases == {}


def test_faults_are_read_from_words() -> None:
    fault = parse_fault("slow:engine=3:factor=5:at=60:for=120", 4)
    assert (fault.kind, fault.engine, fault.factor, fault.at_s, fault.for_s) == ("slow", 3, 5.0, 60.0, 120.0)


@pytest.mark.parametrize(
    "words", ["burn", "slow:engine=4", "slow:engine=x", "slow:what=1", "slow:factor=0", "down:at=-1"]
)
def test_wrong_faults_are_refused(words: str) -> None:
    with pytest.raises(ReplayError):
        parse_fault(words, 4)


@pytest.mark.parametrize(
    "words", ["best", "random:x=1", "sglang-threshold:threshold=2", "expected-latency:tie_ms"]
)
def test_wrong_policies_are_refused(words: str) -> None:
    with pytest.raises(ReplayError):
        parse_policy(words)


def test_perturbed_engines_are_not_the_presets() -> None:
    plain = fleet(1, ["llama-8b-h100"])[0]
    odd = fleet(1, ["llama-8b-h100"], perturb=frozenset({"attention", "blocks"}))[0]
    assert odd.attention_quadratic == 5 * plain.attention_quadratic
    assert odd.block_size == 256
    with pytest.raises(ReplayError, match="perturbation"):
        fleet(1, ["llama-8b-h100"], perturb=frozenset({"luck"}))


def test_the_block_size_follows_the_prompts() -> None:
    short = [Arrival("0", 0.0, 500, 1, unique_blocks(1), 512)]
    long = [Arrival("0", 0.0, 20_000, 1, unique_blocks(40), 512)]
    assert (resolution_of(short), resolution_of(long)) == (64, 512)


def test_with_admission_requests_wait_in_the_gateway_and_none_is_lost() -> None:
    trace = arrivals(200, rate=60.0)
    policy = replace(parse_admission("interactive"), max_wait_s=5.0, max_ttft_s=0.3)
    result = run("expected-latency", setup(2, admission=policy), trace)
    assert [row.id for row in result.served] == [arrival.id for arrival in trace]
    assert {(row.status, row.engine == -1) for row in result.served} == {(200, False), (429, True)}
    at_once = run("expected-latency", setup(2), trace)
    assert max(result.ttfts) < max(at_once.ttfts)
    assert result.attained() > at_once.attained()


def test_an_admission_is_read_from_words() -> None:
    policy = parse_admission("interactive:max_wait_s=20:max_ttft_s=1")
    assert (policy.max_wait_s, policy.max_ttft_s, policy.max_kv_usage) == (20.0, 1.0, 0.9)
    for wrong in ("none", "shared:max_wait", "shared:max_wait_s=x", "shared:max_wait_s=-1", "shared:order=1"):
        with pytest.raises(ReplayError):
            parse_admission(wrong)
