"""The bytes of one conversation turn, for prefix hashing: what a chat template would render, with
unmistakable tags.

Rules of this file:

- tags are bytes that cannot occur in UTF-8 (0xF8 to 0xFF, 0xC0), so text can never imitate one;
- a turn's bytes depend on nothing but the turn, and nothing closes a turn: a conversation that grew starts
  with exactly the bytes it had before;
- a string and a single text part with that string are the same bytes, as templates render them the same;
- media are digests of their raw JSON. Call ids and cache markers are left out: the first are rarely rendered,
  the second wander from turn to turn with Anthropic's clients;
- work is bounded: a budget of items a request, and no tool results inside tool results.

Grammar: ``turn = FF role FE item*``; an item is text (after FD unless it comes first), FC + 16 bytes of
digest, FB name FE arguments (a tool call), F9 reasoning, or F8 item* C0 (a tool's result inside a turn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import xxhash
from msgspec import Raw, Struct, ValidationError

from extproc.api import fields
from extproc.api.fields import ABSENT

TURN = b"\xff"
BODY = b"\xfe"
PART = b"\xfd"
MEDIA = b"\xfc"
CALL = b"\xfb"
SECTION = b"\xfa"
REASONING = b"\xf9"
RESULT = b"\xf8"
END = b"\xc0"

_EDGE = 256


class Function(Struct, gc=False):
    """What a tool call calls; ``arguments`` is a JSON text."""

    name: str
    arguments: str = ""


class Call(Struct, gc=False):
    """A tool call of a chat message."""

    function: Function


class Turn(Struct, gc=False):
    """A chat message, or a message among the items of the Responses API's input."""

    role: str = ""
    content: str | list[Raw] | None = None
    tool_calls: list[Call] | None = None
    function_call: Function | None = None
    reasoning: Raw = ABSENT
    reasoning_content: Raw = ABSENT


class Part(Struct, gc=False):
    """A part of a content list, in OpenAI's or Anthropic's words."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    name: Raw = ABSENT
    input: Raw = ABSENT
    content: Raw = ABSENT


_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_Item = TypeVar("_Item")
OddCall = tuple[Raw, Raw]
"""A call not written as OpenAI does (arguments as an object, no function): its function, and all of it."""

_part = msgspec.json.Decoder(Part)
_turn = msgspec.json.Decoder(Turn)
_TAGS = {
    role: TURN + role.encode() + BODY
    for role in ("system", "developer", "user", "assistant", "tool", "function")
}


def tag(role: str) -> bytes:
    """What opens a turn of this role."""
    return _TAGS.get(role) or TURN + role.encode() + BODY


class Budget:
    """How many turns, parts and calls of one request are still looked at, however many it has."""

    __slots__ = ("left",)

    def __init__(self, left: int = 16_384) -> None:
        self.left = left

    def take(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """As many of ``items`` as there is budget for."""
        if len(items) > self.left:
            items = items[: self.left]
        self.left -= len(items)
        return items


class Writer:
    """Collects the items of one turn; counts media."""

    __slots__ = ("_budget", "_in_result", "media", "out")

    def __init__(self, role: str, budget: Budget) -> None:
        self.out: list[bytes] = [tag(role)]
        self.media = 0
        self._budget = budget
        self._in_result = False

    def piece(self) -> bytes:
        """The turn's bytes."""
        return b"".join(self.out)

    def turn(self, turn: Turn, odd_calls: Sequence[OddCall] = ()) -> None:
        """A message's reasoning, content and tool calls, in this order."""
        for raw in (turn.reasoning_content, turn.reasoning):
            if raw is not ABSENT and (thought := fields.text(raw)):
                self._append(REASONING, thought)
        self.content(turn.content)
        for call in self._budget.take(turn.tool_calls or ()):
            self._call(call.function.name, call.function.arguments)
        if turn.function_call is not None:
            self._call(turn.function_call.name, turn.function_call.arguments)
        for function, whole in self._budget.take(odd_calls):
            self.call(function, whole)

    def content(self, content: str | list[Raw] | None) -> None:
        """A content string or list of parts."""
        if isinstance(content, str):
            self._text(content)
        elif content is not None:
            for raw in self._budget.take(content):
                self._part(raw)

    def raw_content(self, raw: Raw) -> None:
        """Content whose type is not known yet: string, list of parts, or something else, which becomes a
        digest.
        """
        if not fields.is_given(raw):
            return
        string = fields.text(raw)
        if string is not None:
            self._text(string)
        elif fields.opens(raw) == b"[":
            self.content(fields.elements(raw))
        else:
            self._digest(raw)

    def call(self, function: Raw, whole: Raw) -> None:
        """A tool call of any shape: name and arguments (a string, or JSON as it is written).

        Without a name it is ``whole``'s digest.
        """
        keys = fields.members(function)
        name = fields.text(keys.get("name", ABSENT))
        if name is None:
            self._digest(whole)
        else:
            self._raw_call(name, keys.get("arguments", ABSENT))

    def item(self, raw: Raw) -> None:
        """Anything else that is one unit: its digest."""
        self._digest(raw)

    def _raw_call(self, name: str, arguments: Raw) -> None:
        string = fields.text(arguments)
        self.out += (CALL, name.encode(), BODY, bytes(arguments) if string is None else string.encode())

    def _call(self, name: str, arguments: str) -> None:
        self.out += (CALL, name.encode(), BODY, arguments.encode())

    def _part(self, raw: Raw) -> None:
        try:
            part = _part.decode(raw)
        except ValidationError:
            string = fields.text(raw)
            if string is not None:
                self._text(string)
            else:
                self._digest(raw)
            return
        if part.text is not None and part.type in _TEXTS:
            self._text(part.text)
        elif part.type == "thinking" and part.thinking is not None:
            self._append(REASONING, part.thinking)
        elif part.type == "refusal" and part.refusal is not None:
            self._text(part.refusal)
        elif part.type == "tool_use" and (name := fields.text(part.name)) is not None:
            self._raw_call(name, part.input)
        elif part.type == "tool_result" and not self._in_result:
            self._in_result = True
            self.out.append(RESULT)
            self.raw_content(part.content)
            self.out.append(END)
            self._in_result = False
        else:
            self._digest(raw)

    def _text(self, string: str) -> None:
        if len(self.out) > 1:
            self.out.append(PART)
        self.out.append(string.encode())

    def _append(self, mark: bytes, string: str) -> None:
        self.out += (mark, string.encode())

    def _digest(self, raw: Raw) -> None:
        self.media += 1
        self.out += (MEDIA, digest(raw))


def read(raw: Raw) -> tuple[Turn, Sequence[OddCall]] | None:
    """A turn from its raw JSON, as far as its types allow; None when it is no object."""
    try:
        return _turn.decode(raw), ()
    except ValidationError:
        keys = fields.members(raw)
    if not keys:
        return None
    content = keys.get("content", ABSENT)
    string = fields.text(content)
    parts = (fields.elements(content) or [content]) if fields.is_given(content) else None
    turn = Turn(
        role=fields.text(keys.get("role", ABSENT)) or "",
        content=string if string is not None else parts,
        reasoning=keys.get("reasoning", ABSENT),
        reasoning_content=keys.get("reasoning_content", ABSENT),
    )
    calls = [
        (fields.member(call, "function"), call) for call in fields.elements(keys.get("tool_calls", ABSENT))
    ]
    function = keys.get("function_call", ABSENT)
    if fields.is_given(function):
        calls.append((function, function))
    return turn, calls


def digest(raw: Raw) -> bytes:
    """16 bytes for a JSON value as it is written, without an object's ``cache_control`` key.

    The marker is looked for near both ends only, so that a megabyte of base64 is read once.
    """
    view = memoryview(raw)
    if b'"cache_control"' in bytes(view[:_EDGE]) or b'"cache_control"' in bytes(view[-_EDGE:]):
        state = xxhash.xxh3_128()
        for key, value in fields.members(raw).items():
            if key != "cache_control":
                state.update(key.encode() + BODY)
                state.update(memoryview(value))
                state.update(PART)
        return state.digest()
    return xxhash.xxh3_128_digest(view)
