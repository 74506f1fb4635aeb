"""The few keys of a JSON body that routing reads, as raw slices, and tolerant readers of such slices.

A reader never refuses: a value of a surprising type reads as None and the engine judges it. Keys that are not
named here are skipped without being decoded. Most keys are absent in most bodies: every reader asks for that first.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Raw, Struct, ValidationError

ABSENT = Raw()
_LONGEST_LABEL = 256
_LARGEST_COUNT = 2**31 - 1

_string = msgspec.json.Decoder(str)
_lax_int = msgspec.json.Decoder(Annotated[int, Meta(ge=0, le=_LARGEST_COUNT)], strict=False)
_lax_bool = msgspec.json.Decoder(bool, strict=False)
_array = msgspec.json.Decoder(list[Raw])
_object = msgspec.json.Decoder(dict[str, Raw])


class Body(Struct, gc=False):
    """Top-level keys. Of duplicates the last wins, as in Python's parser."""

    model: Raw = ABSENT
    stream: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    tools: Raw = ABSENT
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    messages: Raw = ABSENT
    prompt: Raw = ABSENT
    input: Raw = ABSENT
    query: Raw = ABSENT
    queries: Raw = ABSENT
    documents: Raw = ABSENT
    text_1: Raw = ABSENT
    text_2: Raw = ABSENT
    session_id: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    conversation: Raw = ABSENT
    user: Raw = ABSENT
    safety_identifier: Raw = ABSENT
    metadata: Raw = ABSENT
    cache_salt: Raw = ABSENT


def is_given(raw: Raw) -> bool:
    """Whether the key was there with a value other than null."""
    return raw is not ABSENT and opens(raw) not in b"n"


def opens(raw: Raw) -> bytes:
    """The first byte of a value, which tells its type; empty when absent."""
    return bytes(memoryview(raw)[:1])


def text(raw: Raw) -> str | None:
    """A JSON string; None for anything else."""
    if raw is ABSENT:
        return None
    return _string.decode(raw) if opens(raw) == b'"' else None


def label(raw: Raw) -> str | None:
    """A non-empty string that will be a map key: a long one is replaced by its digest."""
    return None if raw is ABSENT else bounded(text(raw))


def bounded(value: str | None) -> str | None:
    """``value`` as a map key: None when empty, its digest when longer than 256 characters."""
    if not value:
        return None
    if len(value) > _LONGEST_LABEL:
        return "xxh3:" + xxhash.xxh3_128_hexdigest(value.encode())
    return value


def count(raw: Raw) -> int | None:
    """A whole number from 0 to 2^31-1, as lax as the engines' own models ("10" and 10.0 are 10)."""
    if not is_given(raw):
        return None
    try:
        return _lax_int.decode(raw)
    except ValidationError:
        return None


def flag(raw: Raw) -> bool:
    """True for true, 1, "true" and "1"."""
    if not is_given(raw):
        return False
    try:
        return _lax_bool.decode(raw)
    except ValidationError:
        return False


def member(raw: Raw, key: str) -> Raw:
    """One key of a JSON object; absent when ``raw`` is no object or lacks it."""
    return ABSENT if raw is ABSENT else members(raw).get(key, ABSENT)


def members(raw: Raw) -> dict[str, Raw]:
    """The keys of a JSON object as raw slices; empty when ``raw`` is none."""
    return _object.decode(raw) if opens(raw) == b"{" else {}


def elements(raw: Raw) -> list[Raw]:
    """The elements of a JSON array as raw slices; empty when ``raw`` is none."""
    return _array.decode(raw) if opens(raw) == b"[" else []
