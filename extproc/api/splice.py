"""The one change the gateway makes to a client's body: another model name, in place, every other byte as it
came.

Re-encoding a parsed body would round big integers, reorder keys and rewrite escapes; engines and caches
notice.
"""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    rb'[^"\[\]{}]*+("([^"\\]*+(?:\\.[^"\\]*+)*+)(?:"|\\?\Z)(\s*+:)?+|[\[{]++|[\]}]++|\Z)', re.DOTALL
)
"""What stands before a token, then (group 1) a string (group 2) and perhaps the colon that makes it a key (group 3),
or a run of brackets, or the end. A string without an end is one token too: no body makes the walk start again and
again. What stands before is matched and not searched over, which takes a tenth of the time: the interpreter is
held meanwhile.
"""
_MOST_TOKENS = 500_000
_SPACE = re.compile(rb"\s*+")


def splice(body: bytes, span: tuple[int, int], model: str) -> bytes:
    """``body`` with the JSON string at ``span`` ([start, end), quotes included) replaced by ``model``.

    The name is written as ASCII JSON; the caller must send the new length. ``span`` comes from
    :attr:`extproc.api.request.InferenceRequest.model_span`.
    """
    start, end = span
    return b"".join((body[:start], json.dumps(model).encode("ascii"), body[end:]))


def model_span(body: bytes, raw: bytes) -> tuple[int, int] | None:
    """Where ``raw``, the top-level model string as it is written in ``body``, stands. None when it cannot be
    said.

    A single occurrence of those bytes can only be the value itself. With more (the name is also the value of
    another key, or ends a quotation in a prompt) the top-level keys are walked.
    """
    first = body.find(raw)
    if first < 0:
        return None
    if body.find(raw, first + 1) < 0:
        return first, first + len(raw)
    return find_model(body)


def find_model(body: bytes) -> tuple[int, int] | None:
    """Span of the string value of the last top-level ``model`` key of a JSON object, found without a full
    parse.

    Walks strings and brackets only, so it also works on bodies too deep for a parser. The last of duplicate
    keys wins, as in Python's and most other parsers; a last one that is no string gives None. In UTF-8 only.

    Gives up (None) after half a million strings and brackets, so that no body costs more than some 100 ms.
    """
    depth = 0
    span = None
    wanted = -1
    for walked, token in enumerate(_TOKEN.finditer(body)):
        if walked == _MOST_TOKENS:
            return None
        start = token.start(1)
        if start == len(body):
            break
        first = body[start]
        if first == 0x22:
            if depth != 1:
                continue
            if start == wanted:
                span = start, token.end(2) + 1
            elif token[3] is not None and _is_model(token[2]):
                span = None
                wanted = _end_of_space(body, token.end())
        elif first in b"[{":
            depth += token.end() - start
        else:
            depth -= token.end() - start
    return span


def _is_model(key: bytes) -> bool:
    if b"\\" not in key:
        return key == b"model"
    try:
        return bool(json.loads(b'"' + key + b'"') == "model")
    except ValueError:
        return False


def _end_of_space(body: bytes, position: int) -> int:
    match = _SPACE.match(body, position)
    return match.end() if match else position
