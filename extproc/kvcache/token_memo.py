"""Tokenising texts that begin like earlier ones: only what is new is tokenised.

Rules of this file:

- a text is cut into pieces of 1,024 characters; a piece is remembered under the digest of the text up to its
  end, with the tokens it added. A text that begins like an earlier one (a conversation that went on, another
  one under the same system prompt) finds its pieces and is tokenised from the first unknown one on;
- pieces of tokens end where the tokenizer itself cuts words, two characters or more before the end of the piece
  of text: tokens never cross such a cut, and where words end is decided by at most one character more. That holds
  for byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek, Mistral's newer ones); what is no such tokenizer is tokenised
  whole, and every 64th text is tokenised both ways: one difference, and nothing is remembered any more;
- bounded in tokens; the longest unused pieces go first.

For several threads: single dict operations are atomic, and a lost piece is only work done again.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from xxhash import xxh3_128_intdigest

PIECE = 1024
_MARGIN = 2
_VERIFY_EVERY = 64


class Encoding(Protocol):
    """What a tokenizer made of a text: ids, where each token lies in it, and which word each belongs to."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""
        ...

    @property
    def offsets(self) -> Sequence[tuple[int, int]]:
        """Start and end of each token, in characters."""
        ...

    @property
    def word_ids(self) -> Sequence[int | None]:
        """Number of the word each token belongs to."""
        ...


class TokenMemo:
    """``encode`` makes tokens of a text without adding special ones around it, and tells their places untrimmed.
    ``cuts``: the tokenizer cuts words as described above. ``max_tokens`` bounds what is remembered."""

    def __init__(self, encode: Callable[[str], Encoding], *, cuts: bool, max_tokens: int = 4_000_000) -> None:
        self._encode = encode
        self._max_tokens = max_tokens if cuts else 0
        self._pieces: OrderedDict[int, tuple[int, array[int]]] = OrderedDict()
        """Digest of the text up to a piece's end -> where its tokens end, and the tokens."""
        self._held = 0
        self._texts = 0
        self.broken = False
        """Both ways did not agree: nothing is remembered any more."""
        self.known_chars = 0
        """Characters that were found (running total)."""
        self.new_chars = 0
        """Characters that were tokenised (running total)."""

    @property
    def tokens(self) -> int:
        """Tokens remembered (gauge)."""
        return self._held

    def encode(self, text: str) -> array[int]:
        """The text's tokens."""
        self._texts += 1
        if not self._max_tokens or self.broken:
            self.new_chars += len(text)
            return array("I", self._encode(text).ids)
        found = self._through_memory(text)
        if self._texts % _VERIFY_EVERY == 0:
            whole = array("I", self._encode(text).ids)
            if whole != found:
                self.broken = True
                self._pieces.clear()
                self._held = 0
                return whole
        return found

    def _through_memory(self, text: str) -> array[int]:
        tokens = array("I")
        pieces = self._pieces
        digest, cut, at = 0, 0, 0
        digests: list[int] = []
        whole = len(text) // PIECE
        missed = False
        for number in range(whole):
            part = text[number * PIECE : (number + 1) * PIECE].encode("utf-8", "surrogatepass")
            digest = xxh3_128_intdigest(part, digest & 0xFFFFFFFFFFFFFFFF) ^ (digest >> 64)
            digests.append(digest)
            if not missed:
                known = pieces.get(digest)
                if known is None:
                    missed = True
                    continue
                with contextlib.suppress(KeyError):  # another thread made room just now
                    pieces.move_to_end(digest)
                cut, ids = known
                tokens.extend(ids)
                at = number + 1
        self.known_chars += cut
        self.new_chars += len(text) - cut
        if cut >= len(text):
            return tokens
        rest = self._encode(text[cut:] if cut else text)
        if at < whole:
            self._remember(digests, at, whole, cut, rest)
        tokens.extend(rest.ids)
        return tokens

    def _remember(self, digests: list[int], at: int, whole: int, cut: int, rest: Encoding) -> None:
        """Keep the tokens of the pieces from ``at`` on."""
        ids, offsets, words = rest.ids, rest.offsets, rest.word_ids
        begun = start = 0
        start_char = cut
        count = len(ids)
        for number in range(at, whole):
            end = (number + 1) * PIECE - _MARGIN - cut
            last = start
            # The last cut between words before the end of the piece.
            place = begun
            while place < count and offsets[place][1] <= end:
                place += 1
                if place < count and (words[place] != words[place - 1] or words[place] is None):
                    last = place
            begun = place
            char = cut + offsets[last][0] if last < count and last > start else start_char
            self._keep(digests[number], char, array("I", ids[start:last]))
            start, start_char = last, char

    def _keep(self, digest: int, cut: int, ids: array[int]) -> None:
        before = self._pieces.pop(digest, None)
        self._held += len(ids) + 16 - (len(before[1]) + 16 if before is not None else 0)
        self._pieces[digest] = (cut, ids)
        while self._held > self._max_tokens and self._pieces:
            try:
                _, (_, gone) = self._pieces.popitem(last=False)
            except KeyError:
                break
            self._held -= len(gone) + 16
