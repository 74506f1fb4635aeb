"""The simulator's tokens: four bytes of rendered prompt each, and the hashes of their blocks.

Rules of this file:

- a prompt is rendered as pieces, role markers and contents apart, each padded to whole tokens. So a
  conversation that grows keeps the tokens it had, and a reply sent back as an assistant's message becomes
  the tokens it was generated as;
- tokens are kept as bytes, four to a token; a token's id is its bytes as a little-endian number;
- media (images, audio, files) are 256 tokens of their digest;
- a block's hash is chained over the blocks before it, starting from the adapter and the cache salt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

TOKEN_BYTES = 4
_MEDIA_TOKENS = 256
_PAD = (b"", b"\0\0\0", b"\0\0", b"\0")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def tokenise(pieces: Iterable[bytes]) -> bytes:
    """Tokens of the pieces, each padded on its own."""
    return b"".join(piece + _PAD[len(piece) % TOKEN_BYTES] for piece in pieces)


def from_ids(ids: Iterable[int]) -> bytes:
    """Tokens from ids that the client sent."""
    return array("I", [one & 0xFFFFFFFF for one in ids]).tobytes()


def to_ids(tokens: bytes) -> list[int]:
    """The ids of tokens."""
    return array("I", tokens).tolist()


def count(tokens: bytes) -> int:
    """How many tokens there are."""
    return len(tokens) // TOKEN_BYTES


def block_hashes(tokens: bytes, block_size: int, adapter: str | None, salt: str) -> list[int]:
    """Chained hashes of the full blocks."""
    width = block_size * TOKEN_BYTES
    parent = xxhash.xxh3_64_intdigest(f"{adapter or ''}\0{salt}".encode("utf-8", "replace"))
    hashes = []
    for start in range(0, len(tokens) - width + 1, width):
        parent = xxhash.xxh3_64_intdigest(tokens[start : start + width], parent)
        hashes.append(parent)
    return hashes


def text_pieces(text: str) -> list[bytes]:
    """A plain prompt."""
    return [text.encode("utf-8", "replace")]


def chat_pieces(
    messages: Any, tools: Any = None, system: Any = None, *, generation_prompt: bool = True
) -> list[bytes]:
    """A conversation in the order chat templates render it: tools, system, then the turns, then the
    assistant's marker."""
    pieces: list[bytes] = []
    if tools:
        pieces += [b"<tools>", msgspec.json.encode(tools)]
    if system:
        pieces += [b"<system>", *_content_pieces(system)]
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, Mapping):
            pieces += [b"<user>", str(message).encode("utf-8", "replace")]
            continue
        role = str(message.get("role") or message.get("type") or "user")
        pieces += [f"<{role}>".encode("utf-8", "replace"), *_content_pieces(message.get("content"))]
        for extra in ("tool_calls", "arguments", "output"):
            if message.get(extra):
                pieces.append(msgspec.json.encode(message[extra]))
    if generation_prompt:
        pieces.append(b"<assistant>")
    return pieces


def _content_pieces(content: Any) -> list[bytes]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content.encode("utf-8", "replace")]
    pieces = []
    for part in content if isinstance(content, list) else [content]:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if isinstance(text, str) and (isinstance(part, str) or part.get("type") in _TEXT_PARTS):
            pieces.append(text.encode("utf-8", "replace"))
        else:
            digest = hashlib.sha256(msgspec.json.encode(part)).digest()
            pieces.append(digest * (_MEDIA_TOKENS * TOKEN_BYTES // len(digest)))
    return pieces
