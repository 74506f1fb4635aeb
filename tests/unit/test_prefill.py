"""Prefill work: what attention adds to long prompts, and how its share is learned."""

from __future__ import annotations

import random

import pytest

from extproc.fleet.prefill import PRIOR_SHARE, AttentionShare, work


def test_a_short_prompt_is_its_tokens() -> None:
    assert work(100, 0, 0.0) == 100.0
    assert work(100, 0, PRIOR_SHARE) == pytest.approx(100, rel=0.01)


def test_nothing_uncached_is_no_work() -> None:
    assert work(0, 5000, PRIOR_SHARE) == 0.0
    assert work(-3, 5000, PRIOR_SHARE) == 0.0


def test_chunks_of_a_prompt_are_as_much_work_as_the_whole() -> None:
    chunks = work(8000, 0, 1e-4) + work(8000, 8000, 1e-4) + work(4000, 16_000, 1e-4)
    assert chunks == pytest.approx(work(20_000, 0, 1e-4))


def test_cached_tokens_are_attended_to() -> None:
    assert work(1000, 100_000, 2e-5) == pytest.approx(1000 * (1 + 2e-5 * 100_500))


@pytest.mark.parametrize("true", [1e-5, 1e-4, 3e-4])
def test_the_share_is_learned_from_prompts_of_all_lengths_whatever_the_speed(true: float) -> None:
    rng = random.Random(1)
    learned = AttentionShare()
    for _ in range(400):
        tokens, cached = rng.choice([1500, 4000, 12_000, 60_000]), rng.choice([0, 2000, 20_000])
        noise = rng.lognormvariate(0, 0.15)
        learned.observe(tokens, cached, 1.7 * work(tokens, cached, true) * noise)
    assert learned.share == pytest.approx(true, rel=0.35)


def test_a_third_of_absurd_samples_does_no_harm() -> None:
    rng = random.Random(2)
    learned = AttentionShare()
    for number in range(400):
        tokens = rng.choice([1500, 6000, 40_000])
        absurd = 20.0 if number % 3 == 0 else 1.0
        learned.observe(tokens, 0, work(tokens, 0, 1e-4) * absurd)
    assert learned.share == pytest.approx(1e-4, rel=0.4)


def test_prompts_of_one_length_teach_nothing() -> None:
    learned = AttentionShare()
    for _ in range(200):
        learned.observe(3000, 0, 9000)
    assert learned.share == pytest.approx(PRIOR_SHARE)


def test_no_numbers_are_no_samples() -> None:
    learned = AttentionShare()
    for _ in range(100):
        learned.observe(0, 0, 5)
        learned.observe(100, 0, float("nan"))
        learned.observe(100, 0, -1)
    assert learned.share == PRIOR_SHARE
