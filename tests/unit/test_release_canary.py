"""The comparison of two versions in virtual time: small versions of ``loadtest/canary.py``, and its parts."""

from __future__ import annotations

import random

import pytest

from extproc.release.contrast import Contrast
from extproc.release.plan import Guards
from extproc.release.slowness import Slowness
from loadtest.canary import Load, cases, run, wilson

LOAD = Load(rps=5.0)


@pytest.mark.parametrize("case", cases(LOAD), ids=lambda case: case.name.replace(" ", "-"))
def test_whole_releases_end_as_they_should(case: object) -> None:
    """Equal quality goes through, 3 % errors and 1.5x slower do not; one wrong end in 4,000 is expected at most."""
    runs = [run(case, LOAD, Guards(), seed) for seed in range(4)]  # type: ignore[arg-type]
    assert [one.rolled_back for one in runs] == [case.bad] * 4  # type: ignore[attr-defined]


def test_looking_all_the_time_does_not_raise_the_chance_of_a_false_alarm() -> None:
    """At the edge of what is allowed, where nothing helps: 5 % promised, looked at 400 times."""
    alarms = 0
    for seed in range(200):
        rng = random.Random(seed)
        contrast = Contrast(0.0, 0.05, floor=0.01, tuned_for=300)
        for _ in range(400):
            for _ in range(8):
                contrast.add(candidate=rng.random() < 0.5, value=float(rng.random() < 0.1))
            contrast.close()
            if contrast.exceeded:
                alarms += 1
                break
    assert wilson(alarms, 200)[0] < 0.05


def test_a_share_that_grows_while_errors_do_is_no_difference() -> None:
    """Pooled over time the candidate looks three times as bad; at the same times it is equal."""
    rng = random.Random(1)
    contrast = Contrast(0.0, 0.05, floor=0.001)
    for rate, share in ((0.01, 0.05), (0.05, 0.5)):
        for _ in range(100):
            for _ in range(100):
                contrast.add(candidate=rng.random() < share, value=float(rng.random() < rate))
            contrast.close()
    assert contrast.candidate.mean > 1.3 * contrast.baseline.mean
    assert abs(contrast.difference) < 0.005
    assert not contrast.exceeded


def test_a_stretch_without_one_arm_waits_for_it() -> None:
    contrast = Contrast(0.0, 0.05)
    contrast.add(candidate=True, value=1.0)
    contrast.close()
    assert contrast.candidate.n == 0
    contrast.add(candidate=False, value=0.0)
    contrast.close()
    assert contrast.difference == 1.0


def test_few_samples_say_nothing() -> None:
    contrast = Contrast(0.0, 0.05, floor=0.01)
    for _ in range(29):
        contrast.add(candidate=True, value=1.0)
        contrast.add(candidate=False, value=0.0)
    contrast.close()
    assert not contrast.exceeded


@pytest.mark.parametrize(("slower", "expected"), [(1.0, False), (1.1, False), (1.5, True)])
def test_the_tail_is_compared_through_a_surge(slower: float, expected: bool) -> None:
    rng = random.Random(3)
    slowness = Slowness(1.2, 0.005)
    for stretch in range(200):
        surge = 3.0 if 80 <= stretch < 100 else 1.0
        for _ in range(60):
            candidate = rng.random() < 0.5
            ttft = surge * rng.lognormvariate(-1.0, 0.6) * (slower if candidate else 1.0)
            slowness.add(candidate=candidate, ttft_s=ttft)
        slowness.close()
    assert slowness.contrast.exceeded is expected


def test_wilson_knows_that_nothing_seen_is_not_nothing() -> None:
    low, high = wilson(0, 2000)
    assert low == pytest.approx(0.0, abs=1e-12)
    assert 0.0018 < high < 0.002
