"""What holds for the simulated engine whatever it is fed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.simulator.batch import DecodeBatch
from extproc.simulator.engine import Engine
from extproc.simulator.events import (
    Aborted,
    BlocksRemoved,
    BlocksStored,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Rejected,
)
from extproc.simulator.job import Job
from extproc.simulator.profile import Profile


@dataclass(frozen=True)
class Arrival:
    at: float
    family: int
    """Prompts of one family share their prefix."""
    prompt: int
    output: int
    adapter: str | None
    priority: int
    cancelled_after: float | None


# Times are odd so that none falls on the boundary of a step, where rounding would decide.
arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.integers(0, 40).map(lambda n: n * 0.01370317),
        family=st.integers(0, 2),
        prompt=st.integers(1, 40),
        output=st.integers(0, 30),
        adapter=st.sampled_from([None, None, "x", "y"]),
        priority=st.sampled_from([0, 0, 1]),
        cancelled_after=st.none() | st.integers(0, 20).map(lambda n: n * 0.01710613),
    ),
    max_size=12,
)

profiles = st.builds(
    Profile,
    prefill_tokens_per_s=st.sampled_from([500.0, float("inf")]),
    decode_base_s=st.sampled_from([0.0, 0.01]),
    decode_per_seq_s=st.sampled_from([0.0, 0.001]),
    decode_per_kv_token_s=st.sampled_from([0.0, 0.0001]),
    attention_quadratic=st.sampled_from([0.0, 1e-5]),
    block_size=st.sampled_from([1, 4, 16]),
    kv_blocks=st.integers(3, 30),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.sampled_from([3, 16, 1000]),
    max_loras=st.integers(0, 2),
    adapter_load_s=st.sampled_from([0.0, 0.05]),
)


def hashes(arrival: Arrival, index: int, block_size: int) -> tuple[int, ...]:
    """The first half of the prompt is its family's; the rest, and what is generated, is its own."""
    total = (arrival.prompt + arrival.output) // block_size
    shared = arrival.prompt // 2 // block_size
    return tuple(
        (1000 * arrival.family + n) if n < shared else (1_000_000 * (index + 1) + n) for n in range(total)
    )


def check_blocks(engine: Engine) -> None:
    cache = engine.cache
    assert 0 <= cache.used <= cache.capacity
    held = 0
    named: set[int] = set()
    for seq in engine._running:
        length = seq.computed if not seq.decoding else seq.computed + engine._batch.step - seq.joined_step
        tokens = length if seq.decoding else seq.target
        held += engine.profile.blocks_for(tokens) - len(seq.names)
        assert len(set(seq.names)) == len(seq.names)
        named.update(seq.names)
    assert cache.used == held + len(named)


def drive(profile: Profile, work: list[Arrival], pause: float | None = None) -> tuple[Engine, list[Event]]:
    """Feed ``work`` to a new engine; with ``pause`` the driver also looks in every so many seconds."""
    engine = Engine(profile, Random(7), kv_events=True)
    actions: list[tuple[float, int, int]] = []
    for index, arrival in enumerate(work):
        actions.append((arrival.at, 0, index))
        if arrival.cancelled_after is not None:
            actions.append((arrival.at + arrival.cancelled_after, 1, index))
    actions.sort()
    events: list[Event] = []
    clock = 0.0
    for at, what, index in actions:
        while pause and clock + pause < at:
            clock += pause
            events += engine.advance(clock)
            engine.metrics(clock)
            check_blocks(engine)
        if what:
            engine.cancel(str(index), at)
        else:
            one = work[index]
            names = hashes(one, index, profile.block_size)
            engine.submit(Job(str(index), names, one.prompt, one.output, one.adapter, one.priority), at)
    for _turn in range(20_000):
        due = engine.next_event()
        if due is None:
            break
        events += engine.advance(due)
        check_blocks(engine)
    return engine, events


@settings(max_examples=150, deadline=None)
@given(profiles, arrivals)
def test_every_job_ends_exactly_once_and_leaves_nothing_behind(profile: Profile, work: list[Arrival]) -> None:
    engine, events = drive(profile, work)
    ended = [event.id for event in events if isinstance(event, Finished | Aborted | Rejected)]
    assert sorted(ended) == sorted(str(index) for index in range(len(work)))
    metrics = engine.metrics(1e6)
    assert engine.next_event() is None
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0.0)
    assert (metrics.running_adapters, metrics.waiting_adapters) == ((), ())


@settings(max_examples=100, deadline=None)
@given(profiles, arrivals)
def test_counters_agree_with_the_events(profile: Profile, work: list[Arrival]) -> None:
    engine, events = drive(profile, work)
    counters = engine.counters
    assert counters.finished == sum(isinstance(event, Finished) for event in events)
    assert counters.preemptions == sum(isinstance(event, Preempted) for event in events)
    assert counters.first_tokens == sum(isinstance(event, FirstToken) for event in events)
    made = sum(event.output_tokens for event in events if isinstance(event, Finished | Aborted))
    assert counters.generation_tokens == made
    assert counters.prompt_tokens == counters.computed_prompt_tokens + counters.cached_prompt_tokens
    assert counters.prefix_hits <= counters.prefix_queries
    for event in events:
        if isinstance(event, Finished):
            assert event.output_tokens == work[int(event.id)].output


@settings(max_examples=100, deadline=None)
@given(profiles, arrivals)
def test_events_are_in_order_of_time(profile: Profile, work: list[Arrival]) -> None:
    _engine, events = drive(profile, work)
    assert [event.at for event in events] == sorted(event.at for event in events)


@settings(max_examples=100, deadline=None)
@given(profiles, arrivals)
def test_kv_events_retell_the_cache(profile: Profile, work: list[Arrival]) -> None:
    engine, events = drive(profile, work)
    known: set[int] = set()
    for event in events:
        if isinstance(event, BlocksStored):
            assert not known.intersection(event.hashes)
            known.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            assert known.issuperset(event.hashes)
            known.difference_update(event.hashes)
    assert known == {name for name in engine.cache._refs if name >= 0}


@settings(max_examples=60, deadline=None)
@given(profiles, arrivals, st.sampled_from([0.0031, 0.05]))
def test_looking_in_changes_nothing(profile: Profile, work: list[Arrival], pause: float) -> None:
    assert drive(profile, work)[1] == drive(profile, work, pause)[1]


@settings(max_examples=100, deadline=None)
@given(profiles, arrivals)
def test_leaping_over_decode_steps_equals_walking_them(profile: Profile, work: list[Arrival]) -> None:
    _engine, leapt = drive(profile, work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeBatch, "steps_within", lambda self, free, steps: 1)
        _engine, walked = drive(profile, work)
    assert [type(event) for event in leapt if not isinstance(event, BlocksRemoved)] == [
        type(event) for event in walked if not isinstance(event, BlocksRemoved)
    ]
    for one, other in zip(
        (event for event in leapt if isinstance(event, FirstToken | Finished | Preempted)),
        (event for event in walked if isinstance(event, FirstToken | Finished | Preempted)),
        strict=True,
    ):
        assert one.id == other.id
        assert one.at == pytest.approx(other.at, abs=1e-6)
