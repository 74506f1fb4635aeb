"""One request as the simulated engine sees it: sizes and block hashes, no text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Job:
    """What to prefill and how much to generate.

    ``block_hashes`` name the full blocks of the prompt in order, each hash standing for its block and all
    before it (adapter and cache salt included), as non-negative ints. They may go on past the prompt: then
    they name the blocks that the generated tokens fill, so that the next turn of a conversation finds them.
    Blocks without a hash are held and evicted like others but never found again.
    """

    id: str
    block_hashes: Seq[int]
    prompt_tokens: int
    output_tokens: int
    """Tokens to generate; 0 for work that ends with its prefill (embeddings)."""
    adapter: str | None = None
    priority: int = 0
    """Lower goes first; equal ones in order of arrival."""
