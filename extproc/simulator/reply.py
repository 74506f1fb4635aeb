"""The text an engine of ours 'generates': the same for the same prompt, four bytes a token, nothing that
JSON escapes."""

from __future__ import annotations

import xxhash

from extproc.simulator.tokens import TOKEN_BYTES

_WORDS = (
    "the engine reads a prompt once and then writes one word after another until it has said enough for now "
    "while others wait their turn in the same queue and share the same memory so that a long story makes "
    "room for a short one and each of them comes to its end in time with a little luck and good care from "
    "those who send them here "
)
# A multiple of four bytes, so that any token of it may follow the last one.
_TEXT = _WORDS + " " * (-len(_WORDS) % TOKEN_BYTES)
_LENGTH = len(_TEXT) // TOKEN_BYTES


def reply_text(prompt: bytes, tokens: int) -> str:
    """The reply to a tokenised prompt: ``tokens`` tokens of ASCII."""
    start = xxhash.xxh3_64_intdigest(prompt) % _LENGTH
    turns = (start + tokens) // _LENGTH + 1
    return (_TEXT * turns)[start * TOKEN_BYTES : (start + tokens) * TOKEN_BYTES]
