"""Shadow traffic: what is copied, what a copy may do, what is compared."""

from __future__ import annotations

from extproc.core import Core
from extproc.outcome import Usage
from extproc.release.shadow import GRACE_S, SUFFIX, ShadowPlan
from tests.unit.core_parts import core, end, request, spec

PLAN = ShadowPlan("llama", "next", 1.0, max_concurrent=2, rpm=6000, max_duration_s=60.0)
OLD, NEW = spec("old"), spec("new", pool="next", port=8001)


def built(plan: ShadowPlan = PLAN) -> Core:
    made = core([OLD, NEW])
    made.shadows.install([plan], 0.0)
    return made


def one_pair(
    made: Core, name: str = "r", *, ttft: tuple[float, float] = (0.1, 0.2), status: int = 200
) -> None:
    """An original and its copy, from order to end."""
    assert made.shadows.order("llama", name, name, 0.0)
    made.dispatcher.decide(request(name), 0.0)
    assert made.shadows.arrived(name + SUFFIX) is not None
    made.dispatcher.decide(request(name + SUFFIX, model="next"), 0.0)
    made.take(end(name + SUFFIX, NEW, status, ttft_s=ttft[1], usage=Usage(1, 30, 0)), 1.0)
    made.take(end(name, OLD, ttft_s=ttft[0]), 1.0)


def test_copy_and_original_are_compared_side_by_side() -> None:
    made = built()
    for number in range(20):
        one_pair(made, f"r{number}")
    (row,) = made.shadows.report()
    assert (row["copied"], row["compared"], row["running"]) == (20, 20, 0)
    assert row["ratio"] == {"ttft": 2.0, "duration": 1.0, "output_tokens": 1.5}
    assert row["copy"]["ttft_s"] == {"p50": 0.2, "p99": 0.2}  # type: ignore[index]


def test_errors_of_copies_count_but_do_not_disturb_the_times() -> None:
    made = built()
    one_pair(made, "a", status=500)
    one_pair(made, "b")
    (row,) = made.shadows.report()
    assert (row["pairs"], row["compared"]) == (2, 1)
    assert (row["original"]["errors"], row["copy"]["errors"]) == (0, 1)  # type: ignore[index]


def test_a_copy_that_was_not_ordered_or_comes_twice_gets_nothing() -> None:
    made = built()
    assert made.shadows.arrived("forged" + SUFFIX) is None
    made.shadows.order("llama", "r", "r", 0.0)
    assert made.shadows.arrived("r") is None
    assert made.shadows.arrived("r" + SUFFIX) is not None
    assert made.shadows.arrived("r" + SUFFIX) is None


def test_no_more_than_so_many_at_once() -> None:
    made = built()
    assert [made.shadows.order("llama", f"r{n}", "k", 0.0) for n in range(4)] == [True, True, False, False]
    assert made.shadows.totals()["llama"]["concurrent"] == 2


def test_no_more_than_so_many_a_minute() -> None:
    made = built(ShadowPlan("llama", "next", 1.0, max_concurrent=1000, rpm=60))
    ordered = [made.shadows.order("llama", f"{tenth}", "k", tenth / 10) for tenth in range(601)]
    assert 60 <= sum(ordered) <= 62


def test_a_session_is_copied_whole_or_not_at_all() -> None:
    made = built(ShadowPlan("llama", "next", 0.2, max_concurrent=10_000, rpm=600_000))
    copied: dict[str, set[bool]] = {}
    for number in range(3000):
        session = f"s{number % 1000}"
        copied.setdefault(session, set()).add(made.shadows.order("llama", f"r{number}", session, 0.0))
    assert all(len(answers) == 1 for answers in copied.values())
    assert 150 < sum(answers == {True} for answers in copied.values()) < 250


def test_a_copy_that_never_comes_gives_its_place_back() -> None:
    made = built()
    made.shadows.order("llama", "a", "k", 0.0)
    made.shadows.order("llama", "b", "k", 0.0)
    made.shadows.tick(60.0 + GRACE_S)
    assert not made.shadows.order("llama", "c", "k", 91.0)
    made.shadows.tick(61.0 + GRACE_S)
    assert made.shadows.order("llama", "c", "k", 92.0)
    assert made.shadows.totals()["llama"]["lost"] == 2


def test_a_copy_that_finds_no_endpoint_is_an_error_of_the_shadow() -> None:
    made = built()
    made.shadows.order("llama", "r", "r", 0.0)
    made.dispatcher.decide(request("r"), 0.0)
    made.shadows.arrived("r" + SUFFIX)
    made.shadows.refused("r" + SUFFIX, "no_capacity")
    made.take(end("r", OLD), 1.0)
    (row,) = made.shadows.report()
    assert (row["running"], row["copy"]["errors"]) == (0, 1)  # type: ignore[index]
