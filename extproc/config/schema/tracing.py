"""OpenTelemetry traces as people write them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from extproc.config.schema.base import Section, shown, wrong


class Tracing(Section):
    """OpenTelemetry traces (docs/tracing.md). Without `endpoint` there are none, and they cost nothing."""

    endpoint: str | None = None
    """OTLP/HTTP address of a collector, like `http://collector:4318`; `/v1/traces` is added where there is no path."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of requests that are traced, of those whose client sent no `traceparent`."""
    follow_clients: bool = True
    """A client's `traceparent` says whether its request is traced; `false`: `sample_ratio` decides for all."""

    @field_validator("endpoint")
    @classmethod
    def _usable(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        try:
            parts = urlsplit(endpoint)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise wrong(
                f"`{shown(endpoint)}` is no address of a collector; write like `http://collector:4318`"
            )
        if parts.username or parts.password:
            raise wrong("no credentials here; set OTEL_EXPORTER_OTLP_HEADERS in the environment of extproc")
        return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
