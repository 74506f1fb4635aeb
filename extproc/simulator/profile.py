"""How fast and how large a simulated engine is."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Profile:
    """The constants of one engine. A step of the engine takes, in seconds,

        decode_base_s
        + decode_per_seq_s * decoding sequences + decode_per_kv_token_s * tokens they hold
        + sum over prefill chunks of: tokens / prefill_tokens_per_s + attention_quadratic * tokens *
        (context + tokens / 2) + adapter_load_s * adapters that must be loaded first

    so prefill chunks slow the decodes that share their step, as they do on a GPU.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_base_s: float = 0.008
    """Floor of every step: reading the weights once."""
    decode_per_seq_s: float = 0.0
    decode_per_kv_token_s: float = 0.0
    attention_quadratic: float = 0.0
    """Seconds per pair of (new token, token it attends to) in prefill."""
    block_size: int = 16
    """Tokens in a KV block."""
    kv_blocks: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """Tokens of one step, decodes and prefill chunks together."""
    max_loras: int = 0
    """Adapters that may be resident at a time; 0: adapters are refused."""
    adapter_load_s: float = 0.0
    jitter: float = 0.0
    """Relative standard deviation of a step's time."""

    def __post_init__(self) -> None:
        """Refuse a profile on which the engine could not move.

        Raises:
            ValueError: a size is below one or a cost is negative.
        """
        sizes = (self.block_size, self.kv_blocks, self.max_num_seqs, self.max_num_batched_tokens)
        if min(sizes) < 1 or self.max_loras < 0:
            raise ValueError(
                "block_size, kv_blocks, max_num_seqs and max_num_batched_tokens must be at least 1"
            )
        costs = (
            self.decode_base_s,
            self.decode_per_seq_s,
            self.decode_per_kv_token_s,
            self.attention_quadratic,
        )
        if min(*costs, self.adapter_load_s, self.jitter) < 0 or not self.prefill_tokens_per_s > 0:
            raise ValueError("costs must not be negative, and prefill_tokens_per_s must be above 0")

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that ``tokens`` tokens occupy."""
        return -(-tokens // self.block_size)

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Seconds to prefill ``tokens`` tokens after ``context`` tokens already in the cache, without the
        step's floor.
        """
        seconds = 0.0 if math.isinf(self.prefill_tokens_per_s) else tokens / self.prefill_tokens_per_s
        return seconds + self.attention_quadratic * tokens * (context + tokens / 2)
