"""The constants of a simulated engine, fitted to what a real one was seen to do.

Rules of this file:

- prefill: time to the first token of prompts that nothing is cached of, one at a time, is ``front + floor + tokens /
  rate + quadratic * tokens^2 / 2``; decode: the time between tokens is ``floor + per_seq * sequences + per_token *
  tokens they hold`` (``extproc/simulator/profile.py``). ``front`` is what passes outside of the engine's steps: HTTP,
  tokenizer, processes that talk to each other;
- both are least squares of relative errors with no constant below zero: a term that would be is left out. Prompts of
  about one length count once, with their median: a machine that does other things too makes outliers, and the scatter
  around the fit (``jitter``) is the median deviation for the same reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from extproc.simulator.profile import Profile

_SIGMA = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""


@dataclass(slots=True, frozen=True)
class PrefillSample:
    """A prompt alone on an idle engine, with nothing of it cached."""

    tokens: int
    ttft_s: float


@dataclass(slots=True, frozen=True)
class DecodeSample:
    """Time between tokens while ``sequences`` decode that hold ``kv_tokens`` together."""

    sequences: int
    kv_tokens: int
    step_s: float


@dataclass(slots=True, frozen=True)
class Fit:
    """A profile, and the seconds of each request that are not the engine's."""

    profile: Profile
    front_s: float


def fit(
    prefills: Sequence[PrefillSample],
    decodes: Sequence[DecodeSample],
    *,
    block_size: int,
    kv_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Fit:
    """The profile that explains the samples best; what the engine says of itself is taken as it is.

    Raises:
        ValueError: the samples do not show that longer prompts take longer.
    """
    steps = [sample.step_s for sample in decodes]
    floor, per_seq, per_token = least_squares([[1.0, one.sequences, one.kv_tokens] for one in decodes], steps)
    typical = _medians(prefills)
    times = [sample.ttft_s for sample in typical]
    rows = [[1.0, one.tokens, one.tokens**2 / 2] for one in typical]
    constant, linear, quadratic = least_squares(rows, times)
    if not linear and not quadratic:
        raise ValueError("longer prompts did not take longer")
    told = [constant + linear * one.tokens + quadratic * one.tokens**2 / 2 for one in prefills]
    errors = [abs(one.ttft_s / expected - 1) for one, expected in zip(prefills, told, strict=True)]
    profile = Profile(
        prefill_tokens_per_s=1 / linear if linear else math.inf,
        decode_base_s=floor,
        decode_per_seq_s=per_seq,
        decode_per_kv_token_s=per_token,
        attention_quadratic=quadratic,
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        jitter=_SIGMA * statistics.median(errors),
    )
    return Fit(profile, max(constant - floor, 0.0))


def _medians(samples: Sequence[PrefillSample]) -> list[PrefillSample]:
    """One sample for each length, lengths within 5 % taken together."""
    groups: list[list[PrefillSample]] = []
    for one in sorted(samples, key=lambda sample: sample.tokens):
        if not groups or one.tokens > groups[-1][0].tokens * 1.05:
            groups.append([])
        groups[-1].append(one)
    return [
        PrefillSample(group[len(group) // 2].tokens, statistics.median(one.ttft_s for one in group))
        for group in groups
    ]


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, none below zero, with the least squares of relative errors; ``values`` are above zero."""
    used = list(range(len(rows[0])))
    while True:
        scaled = [[row[at] / value for at in used] for row, value in zip(rows, values, strict=True)]
        found = _solve(scaled)
        lowest = min(range(len(used)), key=found.__getitem__)
        if found[lowest] >= 0 or len(used) == 1:
            break
        del used[lowest]
    coefficients = [0.0] * len(rows[0])
    for at, value in zip(used, found, strict=True):
        coefficients[at] = max(value, 0.0)
    return coefficients


def _solve(rows: Sequence[Sequence[float]]) -> list[float]:
    """x with the least squares of ``rows . x - 1``: normal equations by elimination, columns scaled to one."""
    size = len(rows[0])
    scale = [math.sqrt(sum(row[at] ** 2 for row in rows)) for at in range(size)]
    table = [
        [sum(row[i] * row[j] for row in rows) / (scale[i] * scale[j]) for j in range(size)]
        + [sum(row[i] for row in rows) / scale[i]]
        for i in range(size)
    ]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(table[row][at]))
        table[at], table[pivot] = table[pivot], table[at]
        for below in range(at + 1, size):
            factor = table[below][at] / table[at][at]
            table[below] = [a - factor * b for a, b in zip(table[below], table[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(table[at][j] * found[j] for j in range(at + 1, size))
        found[at] = (table[at][size] - rest) / table[at][at]
    return [value / by for value, by in zip(found, scale, strict=True)]
