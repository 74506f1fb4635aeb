"""What one scrape of an engine said. None is 'not said', never zero."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class EngineState:
    """Gauges and counters of one scrape, summed over the engine's ranks where that is what they mean.

    Counters are cumulative since the engine started; a falling counter means a restart.
    """

    at: float
    """Monotonic seconds of the scrape's start."""
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """0..1, the fullest rank."""
    kv_blocks: int | None = None
    """KV blocks of the GPU, all ranks."""
    block_size: int | None = None
    """Tokens in a KV block."""
    prompt_tokens_total: float | None = None
    """Prompt tokens seen, cached ones included."""
    computed_prompt_tokens_total: float | None = None
    """Prompt tokens really prefilled here (cache hits excluded), where the engine tells."""
    first_tokens_total: float | None = None
    """Requests whose first token has come."""
    generation_tokens_total: float | None = None
    counts_steps: bool = False
    """``generation_tokens_total`` grows with every step in which something decodes, not at the end of requests."""
    requests_done_total: float | None = None
    prefix_queries_total: float | None = None
    prefix_hits_total: float | None = None
    preemptions_total: float | None = None
    max_lora: int | None = None
    running_adapters: frozenset[str] | None = None
    waiting_adapters: frozenset[str] | None = None
    sleeping: bool | None = None
    started_at: float | None = None
    """Unix seconds at which the engine process started, where the engine tells."""
