"""The stream guard of a route as people write it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.schema.base import Duration, Section, wrong

Bound = Annotated[Duration, Field(ge=0.05)]


class GuardSettings(Section):
    """Bounds on streamed replies of a route. Needs the filter and routes of the guard in envoy/envoy.yaml."""

    level: Literal["first_token", "whole_stream"] = "first_token"
    """`first_token`: watch until the first byte of the reply. `whole_stream`: watch and pass on every chunk,
    which costs processor time for each."""
    first_token: Bound | None = 30.0
    """Longest wait for the first byte of the reply; then the client gets 504 `first_token_timeout`."""
    heartbeat: Bound | None = 15.0
    """`whole_stream`: an SSE comment goes to the client after so much silence; `null`: none."""
    idle: Bound | None = 120.0
    """`whole_stream`: longest silence of the engine within a stream; then the reply is ended as if cut at its
    token limit."""
    total: Bound | None = None
    """`whole_stream`: longest duration of a reply, not counting `per_token`; then it is ended the same way."""
    per_token: Duration = 0.0
    """`whole_stream`: added to `total` for every token of the request's `max_tokens`."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.level == "first_token" and self.first_token is None:
            raise wrong(
                "a guard of level `first_token` without `first_token` bounds nothing; write a duration"
            )
        if self.per_token and self.total is None:
            raise wrong("`per_token` adds to `total`, which is not set; write `total` too")
        return self
