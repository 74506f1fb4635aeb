"""Windows of the week, and what changes while they are open."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from extproc.config import traffic
from extproc.config.schema import Settings
from extproc.routing.schedule import Window

MON, FRI, SAT, SUN = 0, 4, 5, 6


@pytest.mark.parametrize(
    ("window", "weekday", "minute", "open_"),
    [
        (Window(frozenset({MON}), 540, 1020), MON, 540, True),
        (Window(frozenset({MON}), 540, 1020), MON, 1020, False),
        (Window(frozenset({MON}), 540, 1020), FRI, 600, False),
        (Window(frozenset({FRI}), 1320, 360), FRI, 1400, True),
        (Window(frozenset({FRI}), 1320, 360), SAT, 100, True),
        (Window(frozenset({FRI}), 1320, 360), FRI, 100, False),
        (Window(frozenset({SUN}), 1320, 360), MON, 100, True),
        (Window(frozenset({MON}), 0, 1440), MON, 1439, True),
    ],
)
def test_a_window_holds(window: Window, weekday: int, minute: int, open_: bool) -> None:
    assert window.holds(weekday, minute) is open_


SETTINGS = Settings.model_validate(
    {
        "pools": {"big": {"fallback_pool": "small"}, "small": {"models": ["s"]}},
        "tiers": {"free": {"limits": {"rpm": 60}}},
        "tenants": {"a": {"keys": ["sha256:" + "0" * 64], "tier": "free"}},
        "schedules": [
            {
                "name": "night",
                "days": "mon-fri",
                "begin": "22:00",
                "end": 360,
                "timezone": "Europe/Berlin",
                "tiers": {"free": {"rpm": 600}},
                "fallback": {"big": None},
                "weights": {"canary": {"v2": 1}},
            }
        ],
    }
)


def wall(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def test_times_are_those_of_the_schedules_zone() -> None:
    # 22:00 in Berlin is 21:00 UTC in winter and 20:00 in summer.
    assert traffic.active(SETTINGS, wall("2026-01-05T21:00:00")) == ("night",)
    assert traffic.active(SETTINGS, wall("2026-01-05T20:59:00")) == ()
    assert traffic.active(SETTINGS, wall("2026-07-06T20:00:00")) == ("night",)
    # Friday's window ends on Saturday morning, and Saturday has none.
    assert traffic.active(SETTINGS, wall("2026-01-10T04:00:00")) == ("night",)
    assert traffic.active(SETTINGS, wall("2026-01-10T22:30:00")) == ()


def test_an_open_window_switches_limits_fallback_and_weights() -> None:
    day, night = (traffic.rules(SETTINGS, ["big", "small"], names) for names in ((), ("night",)))
    assert (day.limits.tenants["a"].rpm, night.limits.tenants["a"].rpm) == (60, 600)
    assert (day.policies["big"].fallback, night.policies["big"].fallback) == ("small", None)
    assert traffic.weights(SETTINGS, ("night",)) == {"canary": {"v2": 1.0}}
    assert traffic.weights(SETTINGS, ()) == {}


def test_a_pools_word_goes_before_its_preset_and_both_before_the_top_level() -> None:
    settings = Settings.model_validate(
        {
            "admission": {"preset": "throughput", "max_wait": "50s"},
            "pools": {
                "a": {},
                "b": {"admission": {"max_wait": "5s", "max_kv_usage": 0.0}},
                "c": {"admission": {"preset": "interactive", "headroom": 0.3}},
            },
        }
    )
    policies = traffic.rules(settings, ["a", "b", "c"]).policies
    assert (policies["a"].max_wait_s, policies["a"].error_rate) == (50.0, None)
    assert (policies["b"].max_wait_s, policies["b"].max_kv_usage) == (5.0, None)
    assert (policies["c"].max_wait_s, policies["c"].max_ttft_s, policies["c"].headroom) == (10.0, 2.0, 0.3)
