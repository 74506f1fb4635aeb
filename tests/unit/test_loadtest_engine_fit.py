"""Fitting finds the constants that made the samples."""

from __future__ import annotations

import random

import pytest

from extproc.simulator.profile import Profile
from loadtest.engine_fit import DecodeSample, Fit, PrefillSample, fit, least_squares

SIZES = (256, 512, 1024, 2048)
TRUE = Profile(
    prefill_tokens_per_s=4_000.0, decode_base_s=0.01, decode_per_seq_s=0.002, attention_quadratic=5e-8
)


def fitted(noise: float = 0.0) -> Fit:
    rng = random.Random(4)
    prefills = [
        PrefillSample(size, (0.015 + TRUE.decode_base_s + TRUE.prefill_s(size)) * rng.gauss(1.0, noise))
        for size in SIZES * 8
    ]
    decodes = [
        DecodeSample(count, count * size, TRUE.decode_base_s + TRUE.decode_per_seq_s * count)
        for count in (1, 4, 8)
        for size in (200, 1500)
    ]
    return fit(prefills, decodes, block_size=32, kv_blocks=900, max_num_seqs=16, max_num_batched_tokens=2048)


def test_exact_samples_give_the_constants_back() -> None:
    found = fitted()
    assert found.front_s == pytest.approx(0.015)
    assert found.profile.prefill_tokens_per_s == pytest.approx(4_000.0)
    assert found.profile.attention_quadratic == pytest.approx(5e-8)
    assert found.profile.decode_base_s == pytest.approx(0.01)
    assert found.profile.decode_per_seq_s == pytest.approx(0.002)
    assert found.profile.decode_per_kv_token_s == pytest.approx(0.0, abs=1e-12)
    assert found.profile.jitter == pytest.approx(0.0, abs=1e-9)
    assert (found.profile.block_size, found.profile.kv_blocks, found.profile.max_num_seqs) == (32, 900, 16)


def test_scatter_becomes_the_jitter_of_a_step() -> None:
    found = fitted(noise=0.1)
    assert 0.07 < found.profile.jitter < 0.13
    assert found.profile.prefill_s(1024) + found.front_s == pytest.approx(
        TRUE.prefill_s(1024) + 0.015, rel=0.1
    )


def test_a_few_outliers_change_nothing() -> None:
    clean = [PrefillSample(size + n, 0.025 + TRUE.prefill_s(size)) for size in SIZES for n in range(5)]
    slow = [PrefillSample(size, 1.0) for size in SIZES]
    decodes = [DecodeSample(1, 100, 0.011), DecodeSample(8, 900, 0.018), DecodeSample(4, 6000, 0.014)]
    sizes = {"block_size": 32, "kv_blocks": 900, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
    found = fit(clean + slow, decodes, **sizes)
    assert found.profile.prefill_tokens_per_s == pytest.approx(4_000.0, rel=0.02)
    assert found.profile.jitter < 0.05


def test_a_term_that_would_be_negative_is_left_out() -> None:
    rows = [[1.0, n, n * n] for n in (1.0, 2.0, 3.0, 4.0)]
    constant, linear, square = least_squares(rows, [1.0, 1.7, 2.3, 2.8])
    assert square == 0.0
    assert constant > 0 < linear


def test_prompts_that_cost_nothing_are_refused() -> None:
    flat = [PrefillSample(size, 0.1 - size * 1e-6) for size in SIZES]
    with pytest.raises(ValueError, match="longer"):
        fit(
            flat,
            [DecodeSample(1, 10, 0.01), DecodeSample(2, 30, 0.02), DecodeSample(4, 20, 0.03)],
            block_size=32,
            kv_blocks=9,
            max_num_seqs=1,
            max_num_batched_tokens=32,
        )
