"""What an engine counts and shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Cumulative since the engine was made. Prompt tokens count when their first output token is there, as
    in vLLM.
    """

    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache, at the first start of each job."""
    prefix_hits: int = 0


@dataclass(slots=True, frozen=True)
class EngineMetrics:
    """Gauges at one time, with a copy of the counters."""

    running: int
    waiting: int
    kv_usage: float
    """0..1: blocks held by running sequences; idle cached blocks count as free."""
    cached_blocks: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    counters: Counters
