"""KV-cache events in the bytes of vLLM's ZeroMQ publisher, in its three generations.

- ``arrays``: the batch and its events are msgpack arrays, each event led by its tag (vLLM up to 0.25);
- ``mixed``: the batch is an array, its events are maps with a ``type`` (0.26);
- ``maps``: both are maps (later). Fields at their default are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from extproc.simulator.events import BlocksRemoved, BlocksStored, KvEvent
from extproc.simulator.pump import StoredTokens, Ticket
from extproc.simulator.tokens import TOKEN_BYTES, to_ids


class KvWire(StrEnum):
    """A generation of the format."""

    ARRAYS = "arrays"
    MIXED = "mixed"
    MAPS = "maps"


def encode_batch(events: Sequence[StoredTokens], block_size: int, unix_time: float, wire: KvWire) -> bytes:
    """One batch of events, of data-parallel rank 0."""
    fields = [_fields(event, ticket, block_size) for event, ticket in events]
    if wire is KvWire.ARRAYS:
        rows = [[name, *values.values()] for name, values in fields]
        return msgspec.msgpack.encode([unix_time, rows, 0])
    maps = [
        {"type": name} | {key: value for key, value in values.items() if value is not None or key in _ALWAYS}
        for name, values in fields
    ]
    if wire is KvWire.MIXED:
        return msgspec.msgpack.encode([unix_time, maps, 0])
    return msgspec.msgpack.encode({"ts": unix_time, "events": maps, "data_parallel_rank": 0})


_ALWAYS = frozenset({"parent_block_hash", "lora_id", "medium"})
"""Fields that may be null but have no default, and so are always there."""


def _fields(event: KvEvent, ticket: Ticket | None, block_size: int) -> tuple[str, dict[str, Any]]:
    """The event's name and its fields in vLLM's order."""
    if isinstance(event, BlocksStored):
        width = block_size * TOKEN_BYTES
        start = event.first_block * width
        tokens = b"" if ticket is None else ticket.tokens[start : start + len(event.hashes) * width]
        return "BlockStored", {
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": to_ids(tokens),
            "block_size": block_size,
            "lora_id": None if ticket is None or ticket.adapter is None else 1,
            "medium": "GPU",
            "lora_name": None if ticket is None else ticket.adapter,
            "extra_keys": _extra_keys(event, ticket),
        }
    if isinstance(event, BlocksRemoved):
        return "BlockRemoved", {"block_hashes": event.hashes, "medium": "GPU"}
    return "AllBlocksCleared", {}


def _extra_keys(event: BlocksStored, ticket: Ticket | None) -> list[tuple[str, ...] | None] | None:
    """What besides the tokens went into each hash: the adapter in every block, the salt in a prompt's
    first."""
    if ticket is None or not (ticket.adapter or (ticket.salt and not event.first_block)):
        return None
    adapter = (ticket.adapter,) if ticket.adapter else ()
    keys: list[tuple[str, ...] | None] = [adapter or None] * len(event.hashes)
    if ticket.salt and not event.first_block:
        keys[0] = (*adapter, ticket.salt)
    return keys
