"""What a pool does when its engines are full, and when other rules hold."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from extproc.config.schema.base import Duration, Listing, Name, Section, Size, Table, Written, wrong
from extproc.config.schema.traffic import TrafficLimit

MAX_WAIT_S = 640.0
"""envoy.yaml lets a request ask for 660 s."""


class AdmissionSettings(Section):
    """Waiting, shedding and the circuit of a pool. `null`: as the preset says; `extproc check --explain` prints what
    holds."""

    preset: Literal["interactive", "throughput", "shared", "batch"] | None = None
    """Where the values that are not written come from; `null`: `shared`, or as the top level says."""
    max_wait: Annotated[Duration, Field(le=MAX_WAIT_S)] | None = None
    """Longest wait in the queue; 0: a full pool refuses at once."""
    max_ttft: Duration | None = None
    """An engine whose predicted wait for a first token is longer gets no further requests; 0: not asked."""
    max_kv_usage: Annotated[float, Field(ge=0, le=1)] | None = None
    """An engine whose KV cache is fuller gets no further requests; 0: not asked."""
    max_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests that may wait."""
    max_bytes: Size | None = None
    """Bytes of request bodies that may wait."""
    min_share: Annotated[float, Field(ge=0, le=0.5)] | None = None
    """Share of the tokens that lower priorities, all together, get while higher ones wait."""
    headroom: Annotated[float, Field(ge=0, le=0.9)] | None = None
    """Share of each engine's room that only the highest priority may use, where tenants have several."""
    aging: Duration | None = None
    """After so long in the queue a request counts as one priority higher, never as the highest; 0: never."""
    order: Literal["fair", "deadline"] | None = None
    """Within a priority: tenants share by weight, or the nearest deadline goes first."""
    error_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of failures that opens the pool's circuit: 503 at once; 1: never."""
    fallback_after: Duration | None = None
    """`fallback_pool` answers when the predicted wait is longer."""


_CLOCK = re.compile(r"([01]?[0-9]|2[0-4]):([0-5][0-9])")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def _clock(value: object) -> object:
    """``HH:MM``. YAML reads an unquoted 22:00 as 1320, which is minutes too."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1440:
        return value
    found = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    minutes = int(found[1]) * 60 + int(found[2]) if found else 9999
    if minutes > 1440:
        raise wrong(f"`{value}` is no time of day; write like `22:00`")
    return minutes


def show_clock(minutes: int) -> str:
    """A time of day as a person writes it."""
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _days(value: object) -> object:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)):
        raise wrong("write days like `[mon, tue]` or `mon-fri`")
    out: list[str] = []
    for word in words:
        first, _, last = str(word).lower().partition("-")
        last = last or first
        if first not in _DAYS or last not in _DAYS:
            raise wrong(f"`{word}` is no day; write mon, tue, wed, thu, fri, sat or sun, or like `mon-fri`")
        at = _DAYS.index(first)
        while True:
            out.append(_DAYS[at])
            if _DAYS[at] == last:
                break
            at = (at + 1) % 7
    return tuple(dict.fromkeys(out))


Clock = Annotated[int, BeforeValidator(_clock), Written("time of day", show_clock)]
Days = Annotated[tuple[str, ...], BeforeValidator(_days), Written("days", ", ".join)]
Limits = Annotated[dict[Name, TrafficLimit], Table]
Weights = Annotated[dict[str, Annotated[float, Field(ge=0)]], Table]


class ScheduleSettings(Section):
    """While its window is open, these values hold in place of the usual ones. Of several open ones the last in the
    file rules."""

    name: Name
    """Name in logs."""
    days: Days = _DAYS
    """Days on which the window opens, as `[mon, tue]` or `mon-fri`."""
    begin: Clock = 0
    """Time at which it opens."""
    end: Clock = 1440
    """Time at which it closes; before `begin`: on the next day."""
    timezone: str = "UTC"
    """Time zone of both, as `Europe/Berlin`."""
    weights: Annotated[dict[Name, Weights], Table] = Field(default_factory=dict)
    """Route: shares of its versions."""
    total: TrafficLimit | None = None
    """`rate_limits.total`."""
    tiers: Limits = Field(default_factory=dict)
    """Tier: limits of its tenants, of those too that have their own."""
    tenants: Limits = Field(default_factory=dict)
    """Tenant: its limits."""
    fallback: Annotated[dict[Name, Name | None], Table] = Field(default_factory=dict)
    """Pool: its `fallback_pool`; `null`: none."""

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        from zoneinfo import ZoneInfo

        try:
            ZoneInfo(name)
        except (ValueError, OSError, KeyError):
            raise wrong(
                f"`{name}` is no time zone that this machine knows; write like `Europe/Berlin`, or `UTC`"
            ) from None
        return name

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for route, weights in self.weights.items():
            if not sum(weights.values()):
                raise wrong(f"the weights of route `{route}` are all 0; give one version a share above 0")
        return self


Schedules = Annotated[tuple[ScheduleSettings, ...], Listing]
