"""Shadow traffic of a pool as people write it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from extproc.config.schema.base import Duration, Name, Section


class ShadowSettings(Section):
    """A copy of some requests goes to another pool; its answers are measured and thrown away. Needs the shadow
    listener of envoy/envoy.yaml."""

    pool: Name
    """Pool that gets the copies."""
    percent: Annotated[float, Field(gt=0, le=100)] = 5.0
    """Share of the requests that are copied."""
    max_concurrent: Annotated[int, Field(ge=1)] = 8
    """Copies running at once; no more are made beyond."""
    rpm: Annotated[int, Field(ge=1)] = 600
    """Copies per minute."""
    max_duration: Annotated[Duration, Field(ge=0.1)] = 120.0
    """A copy that runs longer is ended."""
    model: Name | None = None
    """Model name put into the copy's body; `null`: the first of that pool's models."""
