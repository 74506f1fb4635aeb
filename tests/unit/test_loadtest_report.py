"""The numbers of benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.overhead import Verdict
from loadtest.report import (
    Histogram,
    Interval,
    interval,
    number,
    percentile,
    ratio_interval,
    table,
    write_json,
)
from loadtest.soak_cancel import Reading, growth_per_stream


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0], 0.99) == 1.0
    assert math.isnan(percentile([], 0.5))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_a_histogram_is_right_within_a_bucket(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = sorted(values)[math.floor(share * (len(values) - 1))]
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.025)


def test_histograms_add_up() -> None:
    first, second = Histogram(), Histogram()
    first.record(1.0)
    second.record(100.0)
    first.add(second)
    assert first.total == 2
    assert first.percentile(1.0) == pytest.approx(100.0, rel=0.025)


def test_an_interval_is_that_of_students_t() -> None:
    found = interval([1.0, 2.0, 3.0, math.nan])
    assert found.mean == 2.0
    assert found.high == pytest.approx(2.0 + 4.303 / math.sqrt(3), rel=1e-4)


def test_one_value_has_no_interval() -> None:
    assert math.isnan(interval([1.0]).low)


def test_a_ratio_is_the_geometric_mean_of_the_pairs() -> None:
    found = ratio_interval([(1.0, 2.0), (2.0, 16.0)])
    assert found.mean == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        (Interval(1.0, 0.5, 1.5), "within"),
        (Interval(3.0, 2.5, 3.5), "over"),
        (Interval(2.5, 1.5, 3.5), "unsure"),
        (Interval(1.0, math.nan, math.nan), "within"),
        (Interval(math.nan, math.nan, math.nan), "not measured"),
    ],
)
def test_a_budget_is_judged_by_the_interval(measured: Interval, word: str) -> None:
    assert Verdict("x", 2.0, measured, "ms").word == word


def test_growth_is_that_of_the_second_half() -> None:
    readings = [Reading(0, 0, 0, 0), Reading(50, 1000, 0, 0), Reading(100, 1500, 0, 0)]
    assert growth_per_stream(readings) == 10.0


def test_nothing_is_printed_as_a_dash_and_written_as_null(tmp_path: Path) -> None:
    assert number(math.nan) == "-"
    path = tmp_path / "result.json"
    write_json(str(path), {"x": math.nan, "y": Interval(1.0, math.nan, 2.0)})
    assert json.loads(path.read_text()) == {"x": None, "y": {"mean": 1.0, "low": None, "high": 2.0}}


def test_a_table_lines_up() -> None:
    assert table("", ["a", "b"], [["long", "1"]]).splitlines()[-1] == "long  1"
