"""The one question about caches: how many leading tokens of this prompt does each endpoint hold, or is about
to hold?

Rules of this file: a prompt is hashed once (:meth:`CacheView.look`) and may be matched again later, after a
wait in a queue; tokens are blocks times the tokens in a block, learned per model; at least one token is never
held, because an engine always computes the last one to have something to sample from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.api.request import Prompt
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.approximate import Claim as Claim
from extproc.kvcache.hashing import BLOCK_BYTES, hash_blocks


@dataclass(slots=True)
class Look:
    """One prompt, ready to be compared with caches."""

    hashes: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    """Estimated, or exact for prompts of token ids."""
    tokens_per_block: float = BLOCK_BYTES / 4.0
    unique: bool = False
    """The prompt brought blocks of its own to the endpoint it was given to."""

    def tokens(self, blocks: int) -> int:
        """Tokens in so many leading blocks."""
        if blocks <= 0 or self.prompt_tokens <= 0:
            return 0
        return min(int(blocks * self.tokens_per_block), self.prompt_tokens - 1)


class CacheView:
    """Caches of all endpoints. ``seed`` is the installation's secret; ``block_bytes`` how finely prompts are
    cut."""

    def __init__(
        self, index: ApproximateIndex, models: ModelStats, *, seed: int = 0, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.index = index
        self.models = models
        self._seed = seed
        self._block_bytes = block_bytes

    def look(self, prompt: Prompt, model: str, *, adapter: str = "", cache_salt: str = "") -> Look:
        """Hash a prompt. Costs about 0.5 us a KB."""
        hashes = hash_blocks(
            prompt,
            seed=self._seed,
            model=model,
            adapter=adapter,
            cache_salt=cache_salt,
            block_bytes=self._block_bytes,
        )
        if prompt.token_ids is not None:
            return Look(hashes, len(prompt.token_ids), self._block_bytes / 4.0)
        per_token = self.models.bytes_per_token(model)
        return Look(hashes, self.models.prompt_tokens(model, prompt.size), self._block_bytes / per_token)

    def match(self, look: Look) -> dict[int, int]:
        """Slot -> leading tokens held, now; slots that hold nothing are left out."""
        tokens = look.tokens
        return {slot: tokens(blocks) for slot, blocks in self.index.expect(look.hashes).items()}

    def held(self, endpoint: Endpoint, look: Look) -> int:
        """Leading tokens one endpoint holds, now."""
        return look.tokens(self.index.expect_of(endpoint.slot, look.hashes))

    def claim(self, endpoint: Endpoint, look: Look) -> Claim:
        """The endpoint was chosen: it is about to hold the whole prompt."""
        claim = self.index.insert(endpoint.slot, look.hashes)
        look.unique = claim.brought > 0
        return claim

    def answered(self, endpoint: Endpoint, look: Look, output_tokens: int) -> None:
        """The prompt's answer took room in the endpoint's cache, and the conversation may go on from it."""
        after = look.hashes[-1] if look.hashes and look.unique else None
        self.index.occupy(endpoint.slot, int(output_tokens / look.tokens_per_block), after)

    def fit(self, endpoint: Endpoint, model: str = "") -> None:
        """Size the endpoint's room by its engine's KV capacity, where a scrape told it."""
        tokens = endpoint.kv_tokens
        if tokens is not None:
            blocks = int(tokens * self.models.bytes_per_token(model) / self._block_bytes)
            # A learned ratio moves all the time; the room follows in steps of an eighth.
            if abs(blocks - self.index.wanted_of(endpoint.slot)) * 8 > blocks:
                self.index.resize(endpoint.slot, blocks)

    def purge(self, endpoint: Endpoint) -> None:
        """The endpoint's cache is empty or unknown again."""
        self.index.purge(endpoint.slot)
