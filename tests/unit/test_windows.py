"""What one endpoint's windows count."""

from __future__ import annotations

from extproc.fleet.windows import Window
from extproc.outcome import Outcome


def minute(*outcomes: Outcome) -> Window:
    window = Window(6, 10.0)
    for outcome in outcomes:
        window.record(0.1, 1.0, 10, outcome, 5.0)
    return window


def test_every_ended_request_is_counted_whatever_its_outcome() -> None:
    assert minute(Outcome.SUCCESS, Outcome.FAILURE, Outcome.NEUTRAL, Outcome.NEUTRAL).ended(6.0) == 4


def test_neutral_outcomes_say_nothing_about_the_endpoint() -> None:
    window = minute(Outcome.NEUTRAL, Outcome.SUCCESS, Outcome.NEUTRAL)
    assert window.success(6.0) == 1.0
    assert window.tokens_per_s(6.0) == 10 / 60
    only = minute(Outcome.NEUTRAL)
    assert (only.success(6.0), only.ttft_s(6.0), only.duration_s(0.5, 6.0)) == (None, None, None)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    assert minute(Outcome.NEUTRAL, Outcome.SUCCESS).ended(64.0) == 0
