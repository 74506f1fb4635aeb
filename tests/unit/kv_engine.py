"""A small engine that publishes KV events, for tests of the precise index: its cache, its numbers, its ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.kvcache import token_chain

BLOCK = 4


def stored(
    names: Sequence[Any], tokens: Sequence[int], parent: Any = None, size: int = BLOCK, **more: Any
) -> dict[str, Any]:
    """A BlockStored event as a map."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(names: Sequence[Any], **more: Any) -> dict[str, Any]:
    """A BlockRemoved event as a map."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, at: float = 1.0) -> bytes:
    """A message's payload."""
    return msgspec.msgpack.encode([at, list(events), 0])


class KvEngine:
    """Caches prompts of tokens in blocks of four. Every life of it names blocks in its own way."""

    def __init__(self, ring: int = 1000) -> None:
        self.number = 0
        self.ring: list[tuple[int, bytes]] = []
        self.sent: list[tuple[int, bytes]] = []
        """What subscribers get, in order; the test takes it away."""
        self.held: dict[int, tuple[tuple[int, ...], int | None]] = {}
        """Name -> its prompt up to and including it, and its parent."""
        self.copies: dict[int, int] = {}
        self._ring_size = ring
        self._clock = 1.0
        self._life = 0

    def name(self, prefix: tuple[int, ...]) -> int:
        """This life's name for a block."""
        return hash((self._life, prefix)) & 0xFFFFFFFFFFFFFFFF

    def publish(self, *events: Any) -> None:
        """Send one message."""
        self._clock += 0.01
        message = (self.number, batch(*events, at=self._clock))
        self.number += 1
        self.ring = [*self.ring, message][-self._ring_size :]
        self.sent.append(message)

    def prompt(self, tokens: Sequence[int], *, copy: bool = False) -> None:
        """Cache a prompt's full blocks; ``copy``: those that are there already get a second copy."""
        prefixes = [tuple(tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        new = [one for one in prefixes if copy or self.name(one) not in self.held]
        if not new:
            return
        first = prefixes.index(new[0])
        new = prefixes[first:]
        parent = self.name(prefixes[first - 1]) if first else None
        for one in new:
            self.held[self.name(one)] = (one, parent)
            self.copies[self.name(one)] = self.copies.get(self.name(one), 0) + 1
        start = first * BLOCK
        self.publish(
            stored([self.name(one) for one in new], tokens[start : start + BLOCK * len(new)], parent)
        )

    def evict(self, choice: int) -> None:
        """Drop one copy of one block."""
        if self.held:
            name = sorted(self.held)[choice % len(self.held)]
            self.copies[name] -= 1
            if not self.copies[name]:
                del self.copies[name], self.held[name]
            self.publish(removed([name]))

    def clear(self) -> None:
        """Drop everything."""
        self.held.clear()
        self.copies.clear()
        self.publish(CLEARED)

    def restart(self) -> None:
        """A new process: empty, with new names and numbers."""
        self._life += 1
        self.number = 0
        self.ring = []
        self.held.clear()
        self.copies.clear()
        self._clock += 1.0

    def matched(self, tokens: Sequence[int]) -> int:
        """Leading blocks of a prompt that are held."""
        depth = 0
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            if self.name(tuple(tokens[:end])) not in self.held:
                break
            depth += 1
        return depth


def chain(tokens: Sequence[int], *, seed: int = 0, size: int = BLOCK, **more: Any) -> list[int]:
    """Our names of a prompt's blocks."""
    return token_chain.chain(token_chain.packed(list(tokens)), seed=seed, block_size=size, **more)
