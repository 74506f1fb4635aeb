"""Chained hashes of a prompt's tokens in the engine's own blocks: our names for blocks, whoever holds them.

Rules of this file:

- an engine's block names cannot be computed without its seed and hash algorithm, so tokens are hashed again,
  both those of events and those of requests: ``hash[i] = xxh3_64(tokens[i], seed=hash[i - 1])``;
- the chain starts from the installation's secret seed, the block size and the adapter. What else went into a
  block (cache salt, images) is mixed in at that block (:func:`mixed`). Blocks of different sizes, adapters or
  salts never meet;
- tokens are unsigned 32-bit numbers in native byte order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

MAX_BLOCKS = 16_384
"""Longest chain of a request: 256k tokens in blocks of 16."""
TOKEN_BYTES = 4


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes. Raises OverflowError or TypeError for what is no token id."""
    return (tokens if isinstance(tokens, array) else array("I", tokens)).tobytes()


def root(seed: int, block_size: int, adapter: str = "") -> int:
    """Where chains begin."""
    start = f"tokens\0{block_size}\0{adapter}".encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(start, seed & 0xFFFFFFFFFFFFFFFF)


def mixed(parent: int, extra: Sequence[Any]) -> int:
    """``parent`` with what beside tokens goes into the next block."""
    return xxh3_64_intdigest(msgspec.msgpack.encode(extra), parent)


def chain(
    data: bytes, *, seed: int, block_size: int, adapter: str = "", salt: str = "", blocks: int = MAX_BLOCKS
) -> list[int]:
    """Hashes of the first full blocks of a request's packed tokens, at most ``blocks``."""
    width = block_size * TOKEN_BYTES
    full = min(len(data) // width, blocks) * width
    value = root(seed, block_size, adapter)
    if salt:
        value = mixed(value, [salt])
    digest = xxh3_64_intdigest
    hashes: list[int] = []
    append = hashes.append
    for offset in range(0, full, width):
        value = digest(data[offset : offset + width], value)
        append(value)
    return hashes
