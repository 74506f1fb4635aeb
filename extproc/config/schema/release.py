"""Releases of a pool as people write them."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from extproc.config.schema.base import Duration, FilePath, Name, Section, Written, shown, wrong

_STEP = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%(?: +([0-9].*))?")
_LONGEST = 20


class StepSettings(Section):
    """One step of a release."""

    percent: Annotated[float, Field(gt=0, le=100)]
    """Share of the clients that get the candidate, in percent."""
    hold: Duration = 0.0
    """Least time that this share is kept."""


def _steps(value: object) -> object:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, (list, tuple)):
        raise wrong(f"`{shown(value)}` is no plan; write like `5 % 5m, 25 % 10m, 50 % 30m, 100 %`")
    return tuple(_step(part) for part in value)


def _step(part: object) -> object:
    if not isinstance(part, str):
        return part
    found = _STEP.fullmatch(part.strip())
    if found is None:
        raise wrong(f"`{shown(part)}` is no step; write share and time like `25 % 10m`, at the end `100 %`")
    return {"percent": float(found[1]), "hold": found[2].strip() if found[2] else 0.0}


Steps = Annotated[
    tuple[StepSettings, ...],
    BeforeValidator(_steps),
    Field(min_length=1, max_length=_LONGEST),
    Written("steps", lambda steps: ", ".join(f"{step.percent:g} % {step.hold:g}s" for step in steps)),
]
"""Written as ``5 % 5m, 25 % 10m, 50 % 30m, 100 %``, or as a list of such steps."""


class ReleaseGuards(Section):
    """When the candidate counts as worse than the baseline, both seen at the same time. It is then rolled back at
    once."""

    errors: Annotated[float, Field(ge=0, lt=100)] | None = 1.0
    """Error rate above the baseline's, in percentage points; `null`: not asked."""
    ttft: Annotated[float, Field(ge=1, le=100)] | None = 1.2
    """p99 of the time to first token, as a multiple of the baseline's; `null`: not asked."""
    quality: Annotated[float, Field(ge=0)] | None = None
    """Mean of the quality scores below the baseline's; `null`: not asked."""
    false_rollbacks: Annotated[float, Field(gt=0, le=20)] = 1.0
    """Chance, in percent, that a release whose candidate is no worse is rolled back; all guards together."""
    min_samples: Annotated[int, Field(ge=0)] = 100
    """Requests of the candidate that a step must have seen before the next one begins."""


class ReleaseSettings(Section):
    """A new version of the pool takes over in steps. Versions are named in the clusters' metadata. A release whose
    versions or steps change begins anew."""

    baseline: Name
    """Version that serves now."""
    candidate: Name
    """Version that is to take over."""
    steps: Steps
    """Shares and times, as in `5 % 5m, 25 % 10m, 50 % 30m, 100 %`; `100 %` alone: all at once (blue-green)."""
    guards: ReleaseGuards = ReleaseGuards()
    """When it is rolled back."""
    pin_header: str = ""
    """Request header with which testers choose a version by its name, as in `x-release`; empty: none."""

    @field_validator("pin_header")
    @classmethod
    def _a_header_of_clients(cls, name: str) -> str:
        if name.lower().startswith("x-gateway-"):
            raise wrong(f"`{name}` is the gateway's own and removed from client requests; use another header")
        if name != name.strip() or name.startswith(":"):
            raise wrong(f"`{shown(name)}` is no header name; write one like `x-release`")
        return name.lower()

    @model_validator(mode="after")
    def _leads_somewhere(self) -> Self:
        if self.baseline == self.candidate:
            raise wrong(f"`baseline` and `candidate` are both `{self.baseline}`; name two versions")
        shares = [step.percent for step in self.steps]
        if shares != sorted(set(shares)):
            raise wrong("the shares of `steps` must grow from step to step")
        return self


class Releases(Section):
    """Who is told of releases, beside metrics and log."""

    webhook: Annotated[str, Field(pattern=r"^https?://.+", max_length=2000)] | None = None
    """URL that gets every event as a JSON POST; `null`: none."""
    webhook_token_file: FilePath | None = None
    """File with a bearer token for the webhook."""
    webhook_timeout: Annotated[Duration, Field(ge=0.1)] = 5.0
    """Patience with one attempt."""
    webhook_attempts: Annotated[int, Field(ge=1, le=10)] = 4
    """Attempts for one event; the pause between them doubles from one second."""
