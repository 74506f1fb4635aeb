"""Chained block hashes of a prompt: equal leading bytes give equal leading hashes, and nothing else does.

Rules of this file:

- a prompt is cut into blocks of ``block_bytes`` bytes (or as many token ids as fill a block at four bytes an
  id); the rest at the end that fills no block has no hash, as an engine caches no part of a KV block;
- ``hash[i] = xxh3_64(block[i], seed=hash[i - 1])``: a block's hash stands for everything before it;
- the chain starts from the installation's secret seed, the kind of prompt, model, adapter and cache salt.
  Without the seed nobody can make collisions or confirm a guessed prompt from a recorded hash.

256 bytes are about 64 tokens of English: half a block, the mean loss at the end of a match, costs an engine a
few milliseconds; hashing 220 KB takes about 100 us. XXH3:
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from extproc.api.request import Prompt

BLOCK_BYTES = 256
MAX_BLOCKS = 2048
"""About 128k tokens; what follows is never held as far as the index knows."""


def hash_blocks(
    prompt: Prompt,
    *,
    seed: int,
    model: str,
    adapter: str = "",
    cache_salt: str = "",
    block_bytes: int = BLOCK_BYTES,
    max_blocks: int = MAX_BLOCKS,
) -> list[int]:
    """Hashes of the prompt's full blocks, unsigned 64-bit, first block first; empty for prompts under one
    block."""
    if prompt.token_ids is not None:
        kind = "ids"
        wanted = prompt.token_ids[: max_blocks * (block_bytes // 4)]
        data = array("I", [token & 0xFFFFFFFF for token in wanted]).tobytes()
    else:
        kind = "text"
        data = b"".join(prompt.pieces)
    full = min(len(data) // block_bytes, max_blocks) * block_bytes
    if not full:
        return []
    # NUL cannot be confused with a part's own text: lengths come first.
    parts = (kind, model, adapter, cache_salt)
    start = "\0".join([*(str(len(part)) for part in parts), *parts]).encode("utf-8", "surrogatepass")
    digest = xxh3_64_intdigest
    value = digest(start, seed & 0xFFFFFFFFFFFFFFFF)
    hashes: list[int] = []
    append = hashes.append
    for offset in range(0, full, block_bytes):
        value = digest(data[offset : offset + block_bytes], value)
        append(value)
    return hashes
