"""Profiles by name.

The GPU presets are computed from published figures, not fitted: a decode step reads the weights and the KV
cache once, so its cost is bytes over memory bandwidth; prefill does 2 FLOPs per parameter and token. Real
kernels reach a part of the data sheet: 0.5 of the dense FLOPs and 0.7 of the bandwidth are assumed, the
usual range of published MFU and MBU. KV per token is 2 (K and V) x layers x KV heads x head size x 2 bytes.
Memory for KV is 0.9 of the card (vLLM's default) less weights and 2 GB of activations a card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from extproc.simulator.profile import Profile

_MFU = 0.5
_MBU = 0.7


@dataclass(slots=True, frozen=True)
class Gpu:
    """A card by its data sheet: dense BF16/FP16 FLOP/s, bytes/s, bytes."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(slots=True, frozen=True)
class Model:
    """A transformer by its model card; 2 bytes a parameter."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int


H100 = Gpu(989e12, 3.35e12, 80e9)
"""NVIDIA H100 SXM data sheet: 989 TFLOPS dense BF16, 3.35 TB/s, 80 GB."""
A100 = Gpu(312e12, 2.039e12, 80e9)
"""NVIDIA A100 80GB SXM data sheet: 312 TFLOPS dense BF16, 2,039 GB/s."""
A10 = Gpu(125e12, 600e9, 24e9)
"""NVIDIA A10 data sheet: 125 TFLOPS dense FP16, 600 GB/s, 24 GB."""

LLAMA_8B = Model(8.03e9, 32, 32, 8, 128)
"""Llama 3.1 8B, config.json of the model card."""
LLAMA_70B = Model(70.6e9, 80, 64, 8, 128)
"""Llama 3.1 70B, config.json of the model card."""
QWEN_7B = Model(7.62e9, 28, 28, 4, 128)
"""Qwen2.5 7B, config.json of the model card."""


def from_hardware(model: Model, gpu: Gpu, cards: int = 1, *, max_num_seqs: int = 256) -> Profile:
    """The profile of ``model`` on ``cards`` GPUs by tensor parallelism, communication not counted.

    Raises:
        ValueError: the model does not fit.
    """
    weights = model.parameters * 2
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_size * 2
    room = cards * (gpu.memory * 0.9 - 2e9) - weights
    if room <= 0:
        raise ValueError("the weights do not fit on these cards")
    flops = gpu.flops * cards * _MFU
    bandwidth = gpu.bandwidth * cards * _MBU
    return Profile(
        prefill_tokens_per_s=flops / (2 * model.parameters),
        decode_base_s=weights / bandwidth,
        decode_per_seq_s=2 * model.parameters / flops,
        decode_per_kv_token_s=kv_bytes / bandwidth,
        attention_quadratic=4 * model.layers * model.heads * model.head_size / flops,
        block_size=16,
        kv_blocks=int(room / kv_bytes / 16),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_loras=4,
        adapter_load_s=0.5,
        jitter=0.03,
    )


PRESETS: dict[str, Profile] = {
    # Invented for demonstrations on a laptop: first token in tens of milliseconds, about 100 tokens/s, a
    # cache that fills.
    "demo": Profile(
        prefill_tokens_per_s=8_000.0,
        decode_base_s=0.009,
        decode_per_seq_s=0.0001,
        decode_per_kv_token_s=1e-8,
        attention_quadratic=1e-9,
        block_size=16,
        kv_blocks=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_loras=4,
        adapter_load_s=0.3,
        jitter=0.05,
    ),
    # No delays and room for everything: what a gateway costs, not an engine.
    "instant": Profile(
        prefill_tokens_per_s=math.inf,
        decode_base_s=0.0,
        block_size=16,
        kv_blocks=4_000_000,
        max_num_seqs=100_000,
        max_num_batched_tokens=100_000_000,
        max_loras=64,
    ),
    "llama-8b-h100": from_hardware(LLAMA_8B, H100),
    "llama-8b-a100": from_hardware(LLAMA_8B, A100),
    "llama-70b-4xh100": from_hardware(LLAMA_70B, H100, 4),
    "qwen-7b-a10": from_hardware(QWEN_7B, A10),
}
