"""Pools and routes as people write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from extproc.config.schema.admission import AdmissionSettings
from extproc.config.schema.base import (
    FilePath,
    Listing,
    Name,
    Names,
    Section,
    Table,
    Written,
    shown,
    wrong,
)
from extproc.config.schema.guard import GuardSettings
from extproc.config.schema.knowledge import Disaggregation
from extproc.config.schema.release import ReleaseSettings
from extproc.config.schema.shadow import ShadowSettings
from extproc.config.schema.traffic import Secret, TrafficLimit

Strategy = Annotated[str, Field(min_length=1, max_length=64)]
Options = Annotated[dict[str, Any], Table]


Text = Annotated[str, Field(min_length=1, max_length=4_000_000), Written("text")]
WarmUp = Annotated[tuple[Text, ...], Listing]


class PoolSettings(Section):
    """Endpoints that serve the same models. Which endpoints: those whose cluster names this pool in its
    metadata."""

    models: Names = ()
    """Model names that the engines serve, added to those in the clusters' metadata. A pool for which no
    model is known takes any name."""
    aliases: Annotated[dict[str, Name], Table] = Field(default_factory=dict)
    """Client-facing model name: name the engines serve. The name in the request body is replaced, nothing
    else."""
    adapters: Names = ()
    """LoRA adapters served under their own model name; more are learnt from the engines."""
    strategy: Strategy = "expected-latency"
    """How an endpoint is chosen."""
    options: Options = Field(default_factory=dict)
    """Options of the strategy."""
    prefill_tokens_per_second: Annotated[float, Field(gt=0)] = 8000.0
    """Prefill speed of one endpoint in tokens per second, believed until it has been measured."""
    fallbacks: Annotated[int, Field(ge=0, le=8)] = 1
    """Further endpoints named for Envoy's retry when the first cannot be reached."""
    tokenizer: FilePath | None = None
    """Folder with the model's `tokenizer.json`, `tokenizer_config.json` and chat template, as the engines load it.
    With it prompts are counted and compared in tokens; needs `pip install extproc[tokenizers]`."""
    disaggregation: Disaggregation = Disaggregation()
    """Prefill and decode on different endpoints."""
    admission: AdmissionSettings | None = None
    """What this pool does when its engines are full; `null`: as the top level says."""
    fallback_pool: Name | None = None
    """Pool (of a smaller model) that answers when this one cannot in time; decided before the request is sent. Its
    first model goes into the body, and the response says `x-gateway-fallback`."""
    upstream_key: Secret | None = None
    """Key that the engines want, `env:NAME` or `file:PATH`; sent as `Authorization: Bearer`."""
    warm_up: WarmUp = ()
    """System prompts that a new endpoint computes before it gets requests, so that the first users find them in its
    cache. Each is sent straight to the engine, for one token."""
    release: ReleaseSettings | None = None
    """A new version of this pool takes over in steps; `null`: none."""
    shadow: ShadowSettings | None = None
    """Copies of some requests go to another pool, to compare; `null`: none."""


class MatchSettings(Section):
    """Conditions that must all hold; none at all: every request."""

    model: Names = ()
    """Model names, any of which."""
    header: Annotated[dict[str, str], Table] = Field(default_factory=dict)
    """Header name: exact value. All of them."""
    path: str = ""
    """Prefix of the request path."""

    @field_validator("header")
    @classmethod
    def _no_control_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name.lower().startswith("x-gateway-"):
                raise wrong(
                    f"`{name}` is the gateway's own and removed from client requests; use another header"
                )
            if not name or name != name.strip() or name.startswith(":"):
                raise wrong(f"`{shown(name)}` is no header name; write one like `X-Tenant-Tier`")
        return headers

    @field_validator("path")
    @classmethod
    def _rooted(cls, path: str) -> str:
        if path and not path.startswith("/"):
            raise wrong(f"`{shown(path)}` matches no path; begin it with `/`")
        return path


class RouteSettings(Section):
    """Requests that `match` go to `pool`, under policy that overrides the pool's. The first route that
    matches rules."""

    name: Name
    """Name in metrics, logs and decisions."""
    match: MatchSettings = MatchSettings()
    """Conditions."""
    pool: Name
    """Pool that answers."""
    strategy: Strategy | None = None
    """How an endpoint is chosen; `null`: as the pool says."""
    options: Options = Field(default_factory=dict)
    """Options of the strategy."""
    weights: Annotated[dict[str, Annotated[float, Field(ge=0)]], Table] = Field(default_factory=dict)
    """Version: share of the requests, as in `{v1: 90, v2: 10}`; empty: all versions alike."""
    model: Name | None = None
    """Model name to put into the request body in place of the client's."""
    session: Literal["hint", "pin"] = "hint"
    """What an explicit session means here: `hint` prefers its endpoint, `pin` keeps to it as long as it can take
    requests."""
    rate_limit: TrafficLimit | None = None
    """Limits of all requests of this route together."""
    guard: GuardSettings | None = None
    """Bounds on streamed replies; `null`: none."""

    @model_validator(mode="after")
    def _weights_say_something(self) -> Self:
        if self.weights and not sum(self.weights.values()):
            raise wrong(f"`weights` of route `{self.name}` are all 0; give one version a share above 0")
        return self


Pools = Annotated[dict[Name, PoolSettings], Table]
Routes = Annotated[tuple[RouteSettings, ...], Listing]
