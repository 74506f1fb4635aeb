"""The one question about caches: how many leading tokens of this prompt does each endpoint hold, or is about
to hold?

Rules of this file:

- a prompt is hashed once (:meth:`CacheView.look`) and may be matched again later, after a wait in a queue. The
  chain over its tokens is made when the first exact endpoint is asked about, once a block size;
- where the tokens are known and an endpoint's events are whole, its answer is exact: what events say it holds,
  and the prompts on their way to it. Where its events have gaps it is the larger of that and the approximate
  answer; everywhere else the approximate answer, in tokens by the learned size of a token;
- once a prompt is given to an endpoint, of its tokens only the chain in that endpoint's blocks is kept: a lease may
  be open for an hour;
- at least one token is never held, because an engine always computes the last one to have something to sample
  from; an exact answer is whole blocks before that one, as in the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.api.request import Prompt
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache import approximate, token_chain
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.hashing import BLOCK_BYTES, hash_blocks
from extproc.kvcache.in_flight import Hold, InFlight
from extproc.kvcache.precise import PreciseIndex
from extproc.kvcache.ranks import Ranks


@dataclass(slots=True)
class Look:
    """One prompt, ready to be compared with caches."""

    hashes: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    """Estimated, or exact where tokens are known."""
    tokens_per_block: float = BLOCK_BYTES / 4.0
    unique: bool = False
    """The prompt brought blocks of its own to the endpoint it was given to."""
    packed: bytes | None = None
    """Its tokens, where they are known and it was given to no endpoint yet."""
    adapter: str = ""
    salt: str = ""
    chains: dict[int, Sequence[int]] = field(default_factory=dict)
    """Block size -> chain over the tokens, where it was asked for."""

    def tokens(self, blocks: int) -> int:
        """Tokens in so many leading blocks."""
        if blocks <= 0 or self.prompt_tokens <= 0:
            return 0
        return min(int(blocks * self.tokens_per_block), self.prompt_tokens - 1)


class Claim:
    """What one prompt brought to one endpoint. Exactly one of ``keep`` and ``undo`` should follow."""

    __slots__ = ("_blocks", "_hold", "_view", "awaited")

    def __init__(
        self, view: CacheView, blocks: approximate.Claim, hold: Hold | None, *, awaited: bool = False
    ) -> None:
        self._view = view
        self._blocks = blocks
        self._hold = hold
        self.awaited = awaited
        """The endpoint's events will tell when it has the prompt: its last block was not there before."""

    @property
    def told(self) -> bool:
        """The endpoint's events have told of the prompt's last block: it is computed."""
        hold = self._hold
        return self.awaited and hold is not None and self._view.precise.holds(hold.slot, hold.chain[-1])

    @property
    def brought(self) -> int:
        """How many blocks of the approximate index stand, or stood, on this claim."""
        return self._blocks.brought

    def keep(self) -> None:
        """The engine really got the prompt, and its request has ended."""
        self._blocks.keep()
        if self._hold is not None:
            self._view.ended(self._hold)

    def undo(self) -> None:
        """The engine never got the prompt."""
        self._blocks.undo()
        if self._hold is not None:
            self._hold.release()


class CacheView:
    """Caches of all endpoints. ``seed`` is the installation's secret; ``block_bytes`` how finely prompts are
    cut where tokens are not known; ``precise_blocks`` bounds what is kept of the engines' events, and ``worth``
    says what a block off the GPU is worth."""

    def __init__(
        self,
        index: ApproximateIndex,
        models: ModelStats,
        *,
        seed: int = 0,
        block_bytes: int = BLOCK_BYTES,
        precise_blocks: int = 2_000_000,
        worth: Mapping[str, float] | None = None,
    ) -> None:
        self.index = index
        self.models = models
        self.precise = PreciseIndex(seed=seed, max_blocks=precise_blocks, worth=worth)
        self.ranks = Ranks(self.precise)
        self.in_flight = InFlight()
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
        tokens = prompt.tokens
        if prompt.token_ids is not None:
            if tokens is None and self.ranks:
                tokens = token_chain.packed(prompt.token_ids)
            return Look(
                hashes,
                len(prompt.token_ids),
                self._block_bytes / 4.0,
                packed=tokens,
                adapter=adapter,
                salt=cache_salt,
            )
        if tokens:
            count = len(tokens) // token_chain.TOKEN_BYTES
            per_block = self._block_bytes * count / max(prompt.size, 1)
            return Look(hashes, count, per_block, packed=tokens, adapter=adapter, salt=cache_salt)
        per_token = self.models.bytes_per_token(model)
        return Look(hashes, self.models.prompt_tokens(model, prompt.size), self._block_bytes / per_token)

    def match(self, look: Look) -> dict[int, int]:
        """Slot -> leading tokens held, now; slots that hold nothing are left out."""
        tokens = look.tokens
        held = {slot: tokens(blocks) for slot, blocks in self.index.expect(look.hashes).items()}
        if self.ranks and (look.packed is not None or look.chains):
            self.in_flight.settle(self.ranks.taken, self.precise.holds)
            for size, exact in self.ranks.by_size().items():
                chain = self._chain(look, size)
                if chain is None:
                    continue
                chain = chain[: self._most(look, size)]
                told = self.precise.match(chain)
                coming = self.in_flight.match(chain)
                for slot, whole in exact.items():
                    known = int(max(told.get(slot, 0), coming.get(slot, 0)) * size)
                    if not whole:
                        known = max(known, held.get(slot, 0))
                    if known:
                        held[slot] = known
                    else:
                        held.pop(slot, None)
        return held

    def held(self, endpoint: Endpoint, look: Look) -> int:
        """Leading tokens one endpoint holds, now."""
        about = look.tokens(self.index.expect_of(endpoint.slot, look.hashes))
        size = self.ranks.block_size(endpoint.slot)
        chain = None if size is None else self._chain(look, size)
        if size is None or chain is None:
            return about
        self.in_flight.settle(self.ranks.taken, self.precise.holds)
        chain = chain[: self._most(look, size)]
        told = self.precise.match(chain).get(endpoint.slot, 0)
        known = int(max(told, self.in_flight.match_of(endpoint.slot, chain)) * size)
        return known if self.ranks.exact(endpoint.slot) else max(known, about)

    def claim(self, endpoint: Endpoint, look: Look) -> Claim:
        """The endpoint was chosen: it is about to hold the whole prompt."""
        blocks = self.index.insert(endpoint.slot, look.hashes)
        look.unique = blocks.brought > 0
        hold, awaited = None, False
        size = self.ranks.block_size(endpoint.slot)
        chain = None if size is None else self._chain(look, size)
        look.packed = None
        look.chains = {}
        if size is not None and chain is not None:
            kept = chain if isinstance(chain, array) else array("Q", chain)
            look.chains[size] = kept
            hold = self.in_flight.add(endpoint.slot, kept)
            awaited = len(kept) > 0 and not self.precise.holds(endpoint.slot, kept[-1])
        return Claim(self, blocks, hold, awaited=awaited)

    def ended(self, hold: Hold) -> None:
        """The request of a prompt on its way has ended; until the events have told of the prompt it counts."""
        if not hold.chain or self.precise.holds(hold.slot, hold.chain[-1]):
            hold.release()
        else:
            self.in_flight.end(hold, self.ranks.taken(hold.slot))

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
        self.in_flight.purge(endpoint.slot)
        if endpoint.removed:
            self.ranks.remove(endpoint.slot)
        else:
            self.ranks.restarted(endpoint.slot)

    def drain(self) -> None:
        """Forget some of what should be gone. Call it when idle."""
        self.index.drain()
        self.precise.drain()
        self.in_flight.tidy()

    def _chain(self, look: Look, size: int) -> Sequence[int] | None:
        """None where tokens are not known, or not any more."""
        chain = look.chains.get(size)
        if chain is None and look.packed is not None:
            chain = look.chains[size] = token_chain.chain(
                look.packed, seed=self._seed, block_size=size, adapter=look.adapter, salt=look.salt
            )
        return chain

    @staticmethod
    def _most(look: Look, size: int) -> int:
        return max(look.prompt_tokens - 1, 0) // size
