"""The simulated engine in virtual time: exact times for tiny cases."""

from __future__ import annotations

from random import Random

import pytest

from extproc.simulator.engine import Engine
from extproc.simulator.events import (
    Aborted,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Rejected,
    Started,
)
from extproc.simulator.job import Job
from extproc.simulator.profile import Profile

PLAIN = Profile(prefill_tokens_per_s=1000, decode_base_s=0.01, block_size=4, kv_blocks=1000)
"""A step costs 10 ms and every prefilled token 1 ms; blocks of 4 tokens."""


def make(profile: Profile = PLAIN, *, kv_events: bool = False) -> Engine:
    return Engine(profile, Random(1), kv_events=kv_events)


def drain(engine: Engine) -> list[Event]:
    """Run until nothing is left to do."""
    events: list[Event] = []
    while (due := engine.next_event()) is not None:
        events += engine.advance(due)
    return events


def times(events: list[Event], kind: type) -> dict[str, float]:
    return {event.id: pytest.approx(event.at) for event in events if isinstance(event, kind)}


def job(name: str, prompt: int, output: int, *, hashes: tuple[int, ...] = (), **more: object) -> Job:
    return Job(name, hashes, prompt, output, **more)


def test_one_request_takes_its_prefill_and_a_step_per_further_token() -> None:
    engine = make()
    engine.submit(job("a", 100, 5), now=1.0)
    events = drain(engine)
    assert times(events, Started) == {"a": 1.0}
    assert times(events, FirstToken) == {"a": 1.11}
    assert times(events, Finished) == {"a": 1.11 + 4 * 0.01}


def test_the_first_tokens_time_since_arrival_counts_the_waiting() -> None:
    engine = make()
    engine.submit(job("a", 100, 1), now=0.0)
    engine.submit(job("b", 100, 1), now=0.05)
    events = drain(engine)
    first = next(event for event in events if isinstance(event, FirstToken) and event.id == "b")
    assert first.at == pytest.approx(0.22)
    assert first.since_arrival_s == pytest.approx(0.17)


def test_work_without_output_ends_with_its_prefill() -> None:
    engine = make()
    engine.submit(job("a", 100, 0), now=0.0)
    events = drain(engine)
    assert times(events, FirstToken) == {}
    assert times(events, Finished) == {"a": 0.11}


def test_jobs_of_one_instant_share_a_step() -> None:
    engine = make()
    engine.submit(job("a", 100, 2), now=0.0)
    engine.submit(job("b", 50, 2), now=0.0)
    events = drain(engine)
    assert times(events, FirstToken) == {"a": 0.16, "b": 0.16}
    assert times(events, Finished) == {"a": 0.17, "b": 0.17}


def test_a_prefill_slows_the_decodes_that_share_its_step() -> None:
    engine = make()
    engine.submit(job("a", 10, 10), now=0.0)
    # a's first token is there at 0.020, and its step in progress at 0.045 ends at 0.050.
    engine.submit(job("b", 90, 1), now=0.045)
    events = drain(engine)
    assert times(events, Started)["b"] == 0.05
    assert times(events, FirstToken)["b"] == 0.15
    assert times(events, Finished)["a"] == 0.15 + 5 * 0.01


def test_a_long_prompt_is_prefilled_in_chunks_of_the_steps_budget() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=1000, max_num_batched_tokens=40))
    engine.submit(job("a", 100, 1), now=0.0)
    assert times(drain(engine), FirstToken) == {"a": 0.1 + 3 * 0.01}


def test_decodes_are_served_before_the_chunk() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=1000, max_num_batched_tokens=41))
    engine.submit(job("a", 10, 5), now=0.0)
    assert times(engine.advance(0.02), FirstToken) == {"a": 0.02}
    engine.submit(job("b", 80, 1), now=0.02)
    events = drain(engine)
    # a is decoding already when b comes, within the step 0.02 .. 0.03; then two chunks of 40.
    assert times(events, FirstToken)["b"] == 0.03 + 2 * 0.05
    assert times(events, Finished)["a"] == 0.13 + 0.01


def test_decode_time_grows_with_sequences_and_with_the_tokens_they_hold() -> None:
    profile = Profile(1e9, 0.01, decode_per_seq_s=0.001, decode_per_kv_token_s=0.0001, block_size=4)
    engine = make(profile)
    engine.submit(job("a", 10, 3), now=0.0)
    events = drain(engine)
    first = 0.01 + 10e-9
    assert times(events, Finished) == {"a": first + (0.011 + 0.0010) + (0.011 + 0.0011)}


def test_the_quadratic_term_counts_pairs_of_tokens() -> None:
    profile = Profile(1e9, 0.0, attention_quadratic=1e-6, max_num_batched_tokens=50)
    engine = make(profile)
    engine.submit(job("a", 100, 1), now=0.0)
    assert times(drain(engine), FirstToken) == {"a": 1e-6 * 100 * 100 / 2 + 1e-7}


def test_a_cached_prefix_is_not_prefilled_again() -> None:
    engine = make()
    engine.submit(job("a", 100, 1, hashes=tuple(range(25))), now=0.0)
    drain(engine)
    engine.submit(job("b", 108, 1, hashes=tuple(range(27))), now=1.0)
    events = drain(engine)
    assert [event.cached_tokens for event in events if isinstance(event, Started)] == [100]
    assert times(events, FirstToken) == {"b": 1.0 + 0.01 + 0.008}


def test_even_a_fully_cached_prompt_computes_its_last_block() -> None:
    engine = make()
    engine.submit(job("a", 100, 1, hashes=tuple(range(25))), now=0.0)
    drain(engine)
    engine.submit(job("b", 100, 1, hashes=tuple(range(25))), now=1.0)
    assert [event.cached_tokens for event in drain(engine) if isinstance(event, Started)] == [96]


def test_equal_prompts_of_one_instant_share_their_blocks() -> None:
    engine = make()
    for name in "ab":
        engine.submit(job(name, 100, 1, hashes=tuple(range(25))), now=0.0)
    events = drain(engine)
    assert [event.cached_tokens for event in events if isinstance(event, Started)] == [0, 96]
    assert engine.metrics(1.0).counters.computed_prompt_tokens == 104


def test_generated_blocks_enter_the_cache_when_their_hashes_are_known() -> None:
    engine = make()
    # 8 prompt tokens and 9 generated ones, of which the last is never written: 16 tokens, 4 blocks.
    engine.submit(job("a", 8, 9, hashes=(1, 2, 3, 4)), now=0.0)
    drain(engine)
    engine.submit(job("b", 20, 1, hashes=(1, 2, 3, 4, 5)), now=1.0)
    assert [event.cached_tokens for event in drain(engine) if isinstance(event, Started)] == [16]


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=10), kv_events=True)
    engine.submit(job("old", 16, 1, hashes=(1, 2, 3, 4)), now=0.0)
    drain(engine)
    engine.submit(job("new", 16, 1, hashes=(5, 6, 7, 8)), now=1.0)
    drain(engine)
    engine.submit(job("more", 16, 1, hashes=(9, 10, 11, 12)), now=2.0)
    removed = [event.hashes for event in drain(engine) if isinstance(event, BlocksRemoved)]
    assert removed == [(4, 3)]


def test_using_a_block_keeps_it_from_eviction() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=8), kv_events=True)
    for at, (name, hashes) in enumerate([("a", (1, 2, 3)), ("b", (4, 5, 6)), ("a2", (1, 2, 3))]):
        engine.submit(job(name, 13, 1, hashes=hashes), now=float(at))
        drain(engine)
    engine.submit(job("c", 12, 1, hashes=(7, 8, 9)), now=9.0)
    removed = [name for event in drain(engine) if isinstance(event, BlocksRemoved) for name in event.hashes]
    assert removed == [6]


def test_a_job_waits_until_blocks_are_free() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=10))
    engine.submit(job("a", 24, 4), now=0.0)
    engine.submit(job("b", 24, 1), now=0.0)
    assert engine.metrics(0.0).waiting == 2
    engine.advance(0.0)
    assert (engine.metrics(0.0).running, engine.metrics(0.0).waiting) == (1, 1)
    events = drain(engine)
    assert times(events, Started)["b"] == times(events, Finished)["a"].expected


def test_a_job_waits_for_a_sequence_slot() -> None:
    engine = make(Profile(1000, 0.01, max_num_seqs=1))
    engine.submit(job("a", 10, 3), now=0.0)
    engine.submit(job("b", 10, 1), now=0.0)
    assert times(drain(engine), Started)["b"] == 0.02 + 0.02


def test_lower_priority_numbers_go_first() -> None:
    engine = make(Profile(1000, 0.01, max_num_seqs=1))
    engine.submit(job("a", 10, 3), now=0.0)
    engine.advance(0.0)
    engine.submit(job("late", 10, 1, priority=1), now=0.001)
    engine.submit(job("urgent", 10, 1, priority=0), now=0.002)
    order = [event.id for event in drain(engine) if isinstance(event, Started)]
    assert order == ["urgent", "late"]


def test_a_decode_out_of_blocks_preempts_the_newest_and_recomputes_it() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=6))
    engine.submit(job("a", 8, 8), now=0.0)
    engine.submit(job("b", 8, 8), now=0.0)
    # Both hold 2 blocks and need a third for the second token: 6 blocks. For the sixth each needs a fourth.
    events = drain(engine)
    assert times(events, FirstToken) == {"a": 0.026, "b": 0.026}
    assert times(events, Preempted) == {"b": 0.026 + 4 * 0.01}
    assert times(events, Finished)["a"] == 0.026 + 7 * 0.01
    # b had 5 tokens: 13 are prefilled again when a's blocks are free, and yield the sixth.
    restarted = [event for event in events if isinstance(event, Started) and event.id == "b"][1]
    assert restarted.at == pytest.approx(0.096)
    assert restarted.cached_tokens == 0
    assert times(events, Finished)["b"] == 0.096 + 0.023 + 2 * 0.01
    assert engine.metrics(1.0).counters.preemptions == 1
    assert engine.metrics(1.0).counters.generation_tokens == 16


def test_cancelling_a_waiting_job_is_immediate() -> None:
    engine = make(Profile(1000, 0.01, max_num_seqs=1))
    engine.submit(job("a", 10, 3), now=0.0)
    engine.submit(job("b", 10, 3), now=0.0)
    engine.advance(0.0)
    engine.cancel("b", now=0.005)
    assert times(engine.advance(0.005), Aborted) == {"b": 0.005}
    assert engine.metrics(0.005).waiting == 0


def test_cancelling_a_running_job_frees_its_blocks_after_the_step() -> None:
    engine = make()
    engine.submit(job("a", 10, 1000), now=0.0)
    engine.advance(0.02)
    engine.cancel("a", now=0.055)
    events = drain(engine)
    assert times(events, Aborted) == {"a": 0.06}
    assert [event.output_tokens for event in events if isinstance(event, Aborted)] == [5]
    assert engine.metrics(0.06).kv_usage == 0
    assert engine.next_event() is None


def test_cancelling_an_unknown_job_is_ignored() -> None:
    engine = make()
    engine.cancel("nobody", now=1.0)
    assert engine.next_event() is None


def test_tokens_and_memory_are_visible_between_events() -> None:
    engine = make()
    engine.submit(job("a", 8, 100), now=0.0)
    engine.advance(0.0181)
    assert engine.generated("a", 0.0535) == 4
    metrics = engine.metrics(0.0535)
    assert metrics.counters.generation_tokens == 4
    # 8 prompt tokens and 3 decoded ones are written: 3 blocks.
    assert metrics.kv_usage == pytest.approx(3 / 1000)


def test_a_job_that_can_never_fit_is_rejected() -> None:
    engine = make(Profile(1000, 0.01, block_size=4, kv_blocks=10))
    engine.submit(job("a", 30, 11), now=0.5)
    assert engine.next_event() == 0.5
    assert engine.advance(0.5) == [Rejected("a", 0.5, "the request does not fit into the KV cache")]


def test_adapters_are_refused_where_there_are_no_slots() -> None:
    engine = make()
    engine.submit(job("a", 10, 1, adapter="x"), now=0.0)
    assert isinstance(engine.advance(0.0)[0], Rejected)


def test_loading_an_adapter_delays_its_step_once() -> None:
    engine = make(Profile(1000, 0.01, max_loras=1, adapter_load_s=0.5))
    for name in "ab":
        engine.submit(job(name, 10, 1, adapter="x"), now=0.0)
    assert times(drain(engine), FirstToken) == {"a": 0.53, "b": 0.53}
    engine.submit(job("c", 10, 1, adapter="x"), now=1.0)
    assert times(drain(engine), FirstToken) == {"c": 1.02}


def test_a_job_whose_adapter_finds_no_slot_is_passed_over() -> None:
    engine = make(Profile(1000, 0.01, max_loras=1))
    engine.submit(job("x", 10, 3, adapter="x"), now=0.0)
    engine.submit(job("y", 10, 1, adapter="y"), now=0.0)
    engine.submit(job("base", 10, 1), now=0.0)
    engine.advance(0.0)
    metrics = engine.metrics(0.0)
    assert (metrics.running_adapters, metrics.waiting_adapters) == (("x",), ("y",))
    events = drain(engine)
    assert times(events, FirstToken)["base"] == 0.03
    assert times(events, Started)["y"] == times(events, Finished)["x"].expected


def test_stored_blocks_name_their_parent() -> None:
    engine = make(kv_events=True)
    engine.submit(job("a", 10, 1, hashes=(1, 2)), now=0.0)
    drain(engine)
    engine.submit(job("b", 14, 1, hashes=(1, 2, 3)), now=1.0)
    stored = [event for event in drain(engine) if isinstance(event, BlocksStored)]
    assert stored == [BlocksStored(1.0, "b", 2, (3,), 2)]


def test_clearing_the_cache_is_refused_while_sequences_run() -> None:
    engine = make(kv_events=True)
    engine.submit(job("a", 10, 1, hashes=(1, 2)), now=0.0)
    engine.advance(0.0)
    assert not engine.clear_cache(0.001)
    drain(engine)
    assert engine.clear_cache(1.0)
    assert engine.advance(1.0) == [Cleared(1.0)]
    assert engine.cache.cached == 0


def test_a_profile_without_delays_finishes_at_once() -> None:
    engine = make(Profile(float("inf"), 0.0))
    engine.submit(job("a", 100, 50), now=3.0)
    assert times(engine.advance(3.0), Finished) == {"a": 3.0}


def test_a_slow_engine_takes_proportionally_longer() -> None:
    engine = make()
    engine.slowdown = 3.0
    engine.submit(job("a", 100, 1), now=0.0)
    assert times(drain(engine), FirstToken) == {"a": 0.33}


def test_an_id_in_use_is_an_error() -> None:
    engine = make()
    engine.submit(job("a", 1, 1), now=0.0)
    with pytest.raises(ValueError, match="in the engine already"):
        engine.submit(job("a", 1, 1), now=0.0)


def test_a_profile_that_cannot_move_is_an_error() -> None:
    with pytest.raises(ValueError, match="prefill_tokens_per_s"):
        Profile(prefill_tokens_per_s=0)
