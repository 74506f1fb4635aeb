"""What a simulated engine serves, besides its speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.simulator.faults import Faults
from extproc.simulator.kv_wire import KvWire


@dataclass(slots=True, frozen=True)
class Options:
    """Settings of the HTTP front. A port of 0 takes a free one, None opens none."""

    adapters: tuple[str, ...] = ()
    kv_events_port: int | None = None
    kv_replay_port: int = 0
    kv_wire: KvWire = KvWire.MAPS
    control_port: int | None = None
    """A second listener with ``/_sim/`` only, which the faults do not touch."""
    record: int = 0
    """Requests kept for ``/_sim/requests``."""
    record_bytes: int = 1 << 20
    """Kept of each body."""
    output_tokens: int = 64
    """Length of a reply without max_tokens."""
    chunk_tokens: int = 1
    """Tokens in an SSE event."""
    max_model_len: int | None = None
    """Most tokens of prompt and reply together; None means what the KV cache holds, also the most."""
    tick_s: float = 0.02
    """How often streams are told of new tokens."""
    keepalive_s: float = 5.0
    """vLLM's server closes idle connections after 5 s."""
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
