"""The prompt of a request in the order chat templates render it, as pieces of bytes: see ``turns.py`` for
their grammar.

Which keys are read for which API is the table below; tools come first, then system or instructions, then the
turns. What is not a conversation (a completion's prompt, texts to embed or rank) becomes sections, ``FA name
FE text``, one a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, ValidationError

from extproc.api import fields, turns
from extproc.api.fields import Body
from extproc.api.request import Api, Prompt
from extproc.api.turns import BODY, SECTION, Budget, Turn, Writer

_Token = Annotated[int, Meta(ge=0, lt=2**32)]
_turns = msgspec.json.Decoder(list[Turn])
_tokens = msgspec.json.Decoder(tuple[_Token, ...])
_token_lists = msgspec.json.Decoder(list[list[_Token]])


class _Builder:
    """Pieces, media and tokens gathered while the keys are read in order."""

    __slots__ = ("budget", "media", "pieces", "token_ids")

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.media = 0
        self.budget = Budget()
        self.token_ids: tuple[int, ...] | None = None

    def turn(self, role: str) -> Writer:
        return Writer(role, self.budget)

    def add(self, writer: Writer) -> None:
        self.pieces.append(writer.piece())
        self.media += writer.media

    def prompt(self, raw_size: int) -> Prompt:
        if self.token_ids and not self.pieces:
            return Prompt(token_ids=self.token_ids, size=4 * len(self.token_ids))
        size = sum(map(len, self.pieces))
        if not self.budget.left:
            size = max(size, raw_size)
        return Prompt(tuple(self.pieces), None, size, self.media)


def build(api: Api, body: Body) -> Prompt:
    """The prompt of ``body`` for ``api``; empty for APIs that carry none. Raises nothing on strict JSON."""
    builder = _Builder()
    raw_size = 0
    for name, read in _READS.get(api, ()):
        raw: Raw = getattr(body, name)
        if raw is not fields.ABSENT and fields.is_given(raw):
            raw_size += len(memoryview(raw))
            read(builder, name, raw)
    return builder.prompt(raw_size)


def _verbatim(builder: _Builder, name: str, raw: Raw) -> None:
    """Tools and chat documents: the JSON as it is written; templates print it much like that."""
    if bytes(raw) != b"[]":
        builder.pieces.append(b"".join((SECTION, name.encode(), BODY, bytes(raw))))


def _system(builder: _Builder, _: str, raw: Raw) -> None:
    """Anthropic's ``system`` and Responses' ``instructions``: the same bytes as a leading system turn."""
    writer = builder.turn("system")
    writer.raw_content(raw)
    builder.add(writer)


def _messages(builder: _Builder, _: str, raw: Raw) -> None:
    try:
        messages = _turns.decode(raw)
    except ValidationError:
        for item in builder.budget.take(fields.elements(raw)):
            _message(builder, item)
        return
    for turn in builder.budget.take(messages):
        writer = builder.turn(turn.role)
        writer.turn(turn)
        builder.add(writer)


def _message(builder: _Builder, raw: Raw) -> None:
    """One message of any shape; what is no object becomes a turn without a role."""
    found = turns.read(raw)
    if found is None:
        writer = builder.turn("")
        writer.raw_content(raw)
    else:
        turn, odd_calls = found
        writer = builder.turn(turn.role)
        writer.turn(turn, odd_calls)
    builder.add(writer)


def _items(builder: _Builder, name: str, raw: Raw) -> None:
    """Responses' ``input``: a string is one user turn; a list holds messages, calls, their outputs and
    other items.
    """
    if fields.opens(raw) != b"[":
        writer = builder.turn("user")
        writer.raw_content(raw)
        builder.add(writer)
        return
    for item in builder.budget.take(fields.elements(raw)):
        keys = fields.members(item)
        kind = fields.text(keys.get("type", fields.ABSENT)) or "message"
        if kind == "message":
            _message(builder, item)
            continue
        writer = builder.turn(kind)
        if kind == "function_call":
            writer.call(item, item)
        elif kind == "function_call_output":
            writer.raw_content(keys.get("output", fields.ABSENT))
        elif kind == "reasoning" and fields.is_given(keys.get("content", fields.ABSENT)):
            writer.raw_content(keys["content"])
        else:
            writer.item(item)
        builder.add(writer)


def _texts(builder: _Builder, name: str, raw: Raw) -> None:
    """A text, token ids, or a list of either; dicts with a ``text`` count as texts, others as media."""
    items: Sequence[Raw] = (raw,)
    if fields.opens(raw) == b"[":
        if _token_ids(builder, raw):
            return
        items = builder.budget.take(fields.elements(raw))
    tag = b"".join((SECTION, name.encode(), BODY))
    for item in items:
        string = fields.text(item)
        if string is None:
            string = fields.text(fields.member(item, "text"))
        if string is not None:
            builder.pieces.append(tag + string.encode())
        else:
            builder.pieces.append(b"".join((tag, turns.MEDIA, turns.digest(item))))
            builder.media += 1


def _token_ids(builder: _Builder, raw: Raw) -> bool:
    """Take ``[1, 2]`` or ``[[1, 2], [3]]`` (a batch: its prompts after each other); False for anything
    else.
    """
    try:
        ids = _tokens.decode(raw)
    except ValidationError:
        try:
            ids = tuple(chain.from_iterable(_token_lists.decode(raw)))
        except ValidationError:
            return False
    if ids:
        builder.token_ids = ids
    return True


_Read = Callable[[_Builder, str, Raw], None]
_READS: dict[Api, tuple[tuple[str, _Read], ...]] = {
    Api.CHAT: (("tools", _verbatim), ("documents", _verbatim), ("messages", _messages)),
    Api.MESSAGES: (("tools", _verbatim), ("system", _system), ("messages", _messages)),
    Api.RESPONSES: (("tools", _verbatim), ("instructions", _system), ("input", _items)),
    Api.COMPLETIONS: (("prompt", _texts),),
    Api.EMBEDDINGS: (("messages", _messages), ("input", _texts)),
    Api.RERANK: (("query", _texts), ("documents", _texts)),
    Api.SCORE: tuple((name, _texts) for name in ("text_1", "text_2", "query", "queries", "documents")),
    Api.TOKENIZE: (("tools", _verbatim), ("system", _system), ("messages", _messages), ("prompt", _texts)),
    Api.AUDIO: (("input", _texts),),
}
"""API -> the keys that make its prompt, in order, and how each is read."""
