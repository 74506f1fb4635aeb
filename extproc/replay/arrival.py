"""One request of a trace: when, how long, and which content, without any text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from extproc.replay.errors import ReplayError

MOST_BLOCKS = 1 << 20
"""Of one prompt."""
MOST_TOKENS = 64 * MOST_BLOCKS

_unique = itertools.count(1 << 44)


@dataclass(slots=True, frozen=True)
class Arrival:
    """``blocks`` name the prompt's content in runs of ``block_tokens`` tokens.

    A name stands for its run and all before it (LoRA adapter and cache salt included), so equal names are equal
    prefixes. The last run of a prompt may be cut short. Names may go on past the prompt: they are the content of
    the answer, which the next turn of a conversation brings back.
    """

    id: str
    at: float
    """Seconds since the trace began."""
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    block_tokens: int
    session: str | None = None
    adapter: str | None = None
    stream: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be replayed.

        Raises:
            ReplayError: a length below one or beyond reason, or fewer names than the prompt has tokens.
        """
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ReplayError(f"request {self.id}: a prompt has at least one token, an answer at least none")
        if max(self.prompt_tokens, self.output_tokens) > MOST_TOKENS:
            raise ReplayError(f"request {self.id}: it is longer than any engine takes")
        if len(self.blocks) * self.block_tokens < self.prompt_tokens:
            raise ReplayError(f"request {self.id}: {len(self.blocks)} blocks are too few for its prompt")


def unique_blocks(count: int) -> list[int]:
    """Names for content that nobody else has.

    Raises:
        ReplayError: more than any prompt has.
    """
    if count > MOST_BLOCKS:
        raise ReplayError(f"a prompt of {count} blocks is longer than any engine takes")
    return list(itertools.islice(_unique, count))
