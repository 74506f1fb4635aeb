"""A pool: the endpoints that serve one model (and its aliases and adapters), in versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Disaggregation:
    """How prompts are prefilled elsewhere, in pools with prefill and decode endpoints."""

    header: str = "x-prefiller-host-port"
    """Request header that names the prefill endpoint."""
    min_uncached_tokens: int = 512
    """Fewer are prefilled by the decode endpoint itself."""
    transfer_rate: float = 100_000.0
    """Tokens per second whose KV cache reaches the decode endpoint."""


@dataclass(slots=True, frozen=True)
class Pool:
    """Settings of one pool; its endpoints live in the fleet, so that a reload does not lose their state."""

    name: str
    models: tuple[str, ...] = ()
    """Names the engines serve; the first is what ``splice`` puts in for an alias."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Client-facing model name -> name the engine serves (spliced into the body)."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters known from the configuration; more are learnt from the engines."""
    strategy: str = "expected-latency"
    strategy_options: Mapping[str, object] = field(default_factory=dict)
    prefill_rate: float = 8000.0
    """Prior of prefill speed, tokens per second and endpoint."""
    fallbacks: int = 1
    """How many further endpoints a request names for Envoy's retry."""
    disaggregation: Disaggregation = Disaggregation()
