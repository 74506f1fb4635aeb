"""The scanner reads wanted samples as a full parser would, and nothing on a page can make it fail."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.engines.scan import Scanner

SCANNER = Scanner(["eng:running", "eng:tokens_total", "start_seconds"])


def values(text: str, name: str = "eng:running") -> list[float]:
    return [sample.value for sample in SCANNER.scan(text).samples.get(name, [])]


def test_reads_samples_with_and_without_labels() -> None:
    page = SCANNER.scan('eng:running{engine="0"} 3.0\nstart_seconds 1.79e+09\n')
    assert page.total("eng:running", engine="0") == 3.0
    assert page.highest("start_seconds") == 1.79e9


def test_a_longer_name_is_another_family() -> None:
    assert values("eng:running_max 9\neng:running 3\neng:runnin 1\n") == [3.0]


def test_comments_are_no_samples() -> None:
    assert values("# HELP eng:running 4 of them\n# TYPE eng:running gauge\n") == []


def test_time_stamps_and_exemplars_are_left_alone() -> None:
    text = 'eng:running{a="b"} 3 1395066363000\neng:tokens_total 17 1520879607.7 # {id="x"} 0.6\n# EOF\n'
    page = SCANNER.scan(text)
    assert page.total("eng:running") == 3.0
    assert page.total("eng:tokens_total") == 17.0


def test_label_values_may_hold_anything() -> None:
    text = 'eng:running{adapters="a,b} 7 {",path="C:\\\\x",said="\\"hi\\"\\n"} 5\n'
    (sample,) = SCANNER.scan(text).samples["eng:running"]
    assert sample.labels == {"adapters": "a,b} 7 {", "path": "C:\\x", "said": '"hi"\n'}
    assert sample.value == 5.0


def test_windows_line_ends_and_a_last_line_without_one() -> None:
    assert values('eng:running{engine="0"} 3\r\neng:running{engine="1"} 4') == [3.0, 4.0]


def test_values_that_say_nothing_are_unknown_not_zero() -> None:
    page = SCANNER.scan("eng:running NaN\neng:tokens_total +Inf\nstart_seconds -1\n")
    assert math.isnan(page.samples["eng:running"][0].value)
    assert page.total("eng:running") is None
    assert page.total("eng:tokens_total") is None
    assert page.highest("start_seconds") is None


def test_the_known_one_of_several_names_is_taken() -> None:
    page = SCANNER.scan("eng:running NaN\neng:tokens_total 4\n")
    assert page.total("eng:running", "eng:tokens_total") == 4.0


def test_series_of_ranks_are_summed_and_the_fullest_is_found() -> None:
    page = SCANNER.scan('eng:running{engine="0"} 3\neng:running{engine="1"} 4\n')
    assert page.total("eng:running") == 7.0
    assert page.highest("eng:running") == 4.0


def test_a_share_is_never_above_one() -> None:
    assert SCANNER.scan("eng:running 1.02\n").share("eng:running") == 1.0


def test_workers_that_repeat_their_rank_count_once() -> None:
    text = "".join(
        f'eng:running{{dp_rank="{dp}",tp_rank="{tp}"}} {v}\n'
        for dp, tp, v in ((0, 0, 3), (0, 1, 3), (1, 2, 4), (1, 3, 4))
    )
    assert SCANNER.scan(text).total_by_rank("eng:running", rank="dp_rank") == 7.0


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    SCANNER.scan(text)
    SCANNER.scan("eng:running" + text)
    SCANNER.scan('eng:running{a="' + text + '"} 1\n')


@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.floats(0, 1e12)),
        max_size=8,
        unique_by=lambda pair: pair[0],
    ),
    st.floats(0, 1e12),
)
def test_equals_a_full_parser(series: list[tuple[str, float]], total: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("eng:running", "help", ["who"], registry=registry)
    for who, value in series:
        gauge.labels(who).set(value)
    Counter("eng:tokens", "help", registry=registry).inc(total)
    text = generate_latest(registry).decode()
    wanted = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in {"eng:running", "eng:tokens_total"}
    ]
    page = SCANNER.scan(text)
    found = [
        (name, sample.labels, sample.value) for name, samples in page.samples.items() for sample in samples
    ]
    key = repr
    assert sorted(found, key=key) == sorted(wanted, key=key)
