"""The whole of ``extproc.yaml``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from extproc.config.schema.admission import AdmissionSettings, Schedules
from extproc.config.schema.base import FilePath, Name, Section
from extproc.config.schema.knowledge import KvEvents, Sessions, Tokenizers
from extproc.config.schema.listen import Envoy, Listen
from extproc.config.schema.operation import (
    Decisions,
    Health,
    Index,
    Limits,
    Logging,
    Removal,
    Responses,
    Retries,
    Scrape,
)
from extproc.config.schema.pools import Pools, Routes
from extproc.config.schema.release import Releases
from extproc.config.schema.tracing import Tracing
from extproc.config.schema.traffic import IdentitySettings, RateLimits, Tenants, Tiers

START_ONLY: tuple[str, ...] = (
    "listen",
    "envoy.live",
    "envoy.admin",
    "limits",
    "scrape",
    "feedback",
    "index",
    "kv_events",
    "tokenizers",
    "decisions",
    "releases",
    "responses",
    "logging.level",
    "logging.format",
    "tracing",
    "state_dir",
)
"""Keys that are read when extproc starts; a change of them takes effect with the next start. A section's name stands for
all its keys. Everything else follows the files while extproc runs."""


class Settings(Section):
    """Everything is optional: without `extproc.yaml` pools come from the metadata of the clusters alone."""

    pools: Pools = Field(default_factory=dict)
    """Pool name: what is said of it beyond the metadata of its clusters."""
    routes: Routes = ()
    """Routes in order; the first that matches rules. Without one, a request goes to the pool that serves
    its model."""
    default_pool: Name | None = None
    """Pool for requests that name no model; `null`: the only pool, where there is just one."""
    listen: Listen = Listen()
    """Sockets of extproc itself."""
    envoy: Envoy = Envoy()
    """Files shared with Envoy."""
    limits: Limits = Limits()
    """Bounds on what is held at once."""
    tenants: Tenants = Field(default_factory=dict)
    """Tenant name: who may ask, and for how much. Without any, everybody may and no key is asked for."""
    tiers: Tiers = Field(default_factory=dict)
    """Tier name: what its tenants have in common."""
    identity: IdentitySettings = IdentitySettings()
    """How clients are recognised."""
    rate_limits: RateLimits = RateLimits()
    """Limits beside those of tenants and routes."""
    admission: AdmissionSettings = AdmissionSettings()
    """What pools do when their engines are full."""
    schedules: Schedules = ()
    """Windows of the week in which other weights, limits or fallbacks hold."""
    scrape: Scrape = Scrape()
    """Reading the engines' metrics."""
    health: Health = Health()
    """Keeping away from endpoints that fail."""
    retries: Retries = Retries()
    """Sending requests again."""
    removal: Removal = Removal()
    """Taking endpoints out while they serve."""
    feedback: Literal["access_log", "stream"] = "access_log"
    """How extproc learns that a request ended: Envoy's gRPC access log, or (behind gateways whose Envoy has
    none for us) by keeping the ext_proc stream to its end."""
    index: Index = Index()
    """Memory of the engines' prefix caches."""
    kv_events: KvEvents = KvEvents()
    """KV-cache events of the engines."""
    tokenizers: Tokenizers = Tokenizers()
    """Tokens of prompts, for pools with a `tokenizer`."""
    sessions: Sessions = Sessions()
    """Conversations that name themselves."""
    decisions: Decisions = Decisions()
    """Records of decisions."""
    releases: Releases = Releases()
    """Who is told of releases."""
    responses: Responses = Responses()
    """What clients are told."""
    logging: Logging = Logging()
    """extproc's own log."""
    tracing: Tracing = Tracing()
    """OpenTelemetry traces of requests."""
    state_dir: FilePath = "state"  # type: ignore[assignment]
    """Folder for what survives a restart (learnt rates, the installation's hash seed)."""
