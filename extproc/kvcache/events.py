"""KV-cache events as engines publish them (vLLM, SGLang), from msgpack bytes to plain values.

Rules of this file:

- a batch is an array ``[time, events, rank]`` or a map ``{ts, events, data_parallel_rank}``; an event is an array
  led by its tag or a map with ``type``; any of the four combinations is read. Arrays may be cut short anywhere
  after the fields that have no default, maps may leave out any other field;
- a block's name is 64 bits: integers come signed or unsigned, bytes are taken by their last eight, as vLLM
  itself shortens them;
- a batch that is no batch raises :class:`WireError`; a single event that makes no sense is counted and the
  others are kept. Nothing here knows what a name means;
- opening a batch only finds where its events begin: each is read when its turn comes, because an engine may put
  a whole cache into one message.

Source: ``vllm/distributed/kv_events.py`` of vLLM 0.8 to 0.32 (arrays first; events as maps from 0.26 on).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

_MASK = 0xFFFFFFFFFFFFFFFF
_decode = msgspec.msgpack.Decoder().decode


class WireError(ValueError):
    """The bytes are no batch of events."""


@dataclass(slots=True)
class Stored:
    """Full blocks entered a cache, one after another behind ``parent``."""

    names: list[int]
    parent: int | None
    """Name of the block before the first; None at the start of a prompt."""
    tokens: list[int]
    """Empty where an offloading tier names blocks that the GPU has told of before."""
    block_size: int
    medium: str = "GPU"
    adapter: str = ""
    extra: Sequence[Sequence[Any] | None] | None = None
    """What beside tokens went into each block's name; None: nothing, or the engine does not say."""
    group: int | None = None
    kind: str | None = None
    """The attention kind of the cache group, where the engine tells."""


@dataclass(slots=True)
class Removed:
    """Blocks left a cache."""

    names: list[int]
    medium: str = "GPU"
    group: int | None = None


@dataclass(slots=True)
class Cleared:
    """The whole cache was dropped."""


class Odd(Enum):
    """An event that cannot be taken."""

    UNDECODABLE = "undecodable"
    """Its fields make no sense."""
    UNKNOWN = "unknown"
    """We do not know its type."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class Batch:
    """What one message holds: iterate it, an event at a time."""

    at: float
    """Unix seconds, by the engine's clock."""
    rows: list[msgspec.Raw]

    def __iter__(self) -> Iterator[Event | Odd]:
        for row in self.rows:
            try:
                yield _event(_decode(row))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                yield Odd.UNDECODABLE


class _Array(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _Map(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]


_open_array = msgspec.msgpack.Decoder(_Array).decode
_open_map = msgspec.msgpack.Decoder(_Map).decode


def decode(payload: bytes) -> Batch:
    """Open one message's payload. Raises WireError when it is no batch."""
    try:
        # A map's first byte is 0x80 to 0x8f, or 0xde or 0xdf: https://github.com/msgpack/msgpack/blob/master/spec.md
        is_map = payload[:1] in b"\xde\xdf" or payload[:1] < b"\x90"
        outer = _open_map(payload) if is_map else _open_array(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError("no batch") from error
    return Batch(outer.ts, outer.events)


def time_of(payload: bytes) -> float:
    """When the engine made the batch. Raises WireError when it is no batch."""
    return decode(payload).at


_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Event type -> the order of its fields as an array."""


def _event(row: Any) -> Event | Odd:
    if isinstance(row, Mapping):
        kind, values = row["type"], row
    else:
        kind = row[0]
        values = dict(zip(_FIELDS.get(kind, ()), row[1:], strict=False))
    if kind == "BlockStored":
        size = values["block_size"]
        tokens = values["token_ids"]
        names = _names(values["block_hashes"])
        if type(size) is not int or type(tokens) is not list:
            raise ValueError("token_ids")
        if tokens and (size < 1 or len(tokens) != len(names) * size):
            raise ValueError("token_ids")
        parent = values.get("parent_block_hash")
        adapter = values.get("lora_name")
        if adapter is None and (number := values.get("lora_id")) is not None:
            # Engines of the first generation have numbers only; nobody else uses such names.
            adapter = f"\0{number}"
        extra = values.get("extra_keys")
        if extra is not None and len(extra) != len(names):
            raise ValueError("extra_keys")
        return Stored(
            names,
            None if parent is None else _name(parent),
            tokens,
            size,
            _text(values.get("medium"), "GPU").upper(),
            _text(adapter, ""),
            extra,
            values.get("group_idx"),
            values.get("kv_cache_spec_kind"),
        )
    if kind == "BlockRemoved":
        return Removed(
            _names(values["block_hashes"]),
            _text(values.get("medium"), "GPU").upper(),
            values.get("group_idx"),
        )
    return Cleared() if kind == "AllBlocksCleared" else Odd.UNKNOWN


def _names(values: Any) -> list[int]:
    return [value & _MASK if type(value) is int else _name(value) for value in values]


def _name(value: Any) -> int:
    if type(value) is int:
        return value & _MASK
    if type(value) is bytes and len(value) >= 8:
        return int.from_bytes(value[-8:], "big")
    raise ValueError("block hash")


def _text(value: Any, default: str) -> str:
    if value is None:
        return default
    if type(value) is not str:
        raise ValueError("text")
    return value
