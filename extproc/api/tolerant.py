"""Further readings of bodies that Python engines accept and a strict parser does not.

``json.loads``, which most engines use, takes NaN and Infinity, a byte order mark, UTF-16 and UTF-32, and lone
surrogates (``"\\ud800"``). Such a body must be routed, not refused. A mark and surrogates are patched, at the
cost of another first reading; the others are parsed whole, about ten times slower and holding the interpreter
while it runs: the edge reads large bodies in a thread, and those above :data:`LARGEST` are not parsed whole.
"""

from __future__ import annotations

import json
import math
import re

LARGEST = 16 << 20
"""Bytes; a larger body is routed by its top-level model key alone."""

_MOST_LONE = 100_000
_MARK = b"\xef\xbb\xbf"
_LONE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)


def patch(body: bytes) -> bytes:
    """``body`` without a byte order mark and with escaped lone surrogates as U+FFFD, for reading only.

    Byte offsets stay as they are: a mark becomes spaces. Surrogates are left in bodies above :data:`LARGEST` and where
    there are very many: a search over them holds the interpreter.
    """
    if body.startswith(_MARK):
        body = b"   " + body[len(_MARK) :]
    if len(body) > LARGEST:
        return body
    patched = None
    for number, lone in enumerate(_LONE.finditer(body)):
        if number == _MOST_LONE:
            return body
        patched = patched or bytearray(body)
        patched[lone.start() : lone.end()] = b"\\ufffd"
    return body if patched is None else bytes(patched)


def clean(body: bytes, wanted: tuple[str, ...]) -> bytes:
    """The ``wanted`` top-level keys of ``body`` as strict UTF-8 JSON, for reading only.

    NaN and infinities become null, lone surrogates ``?``. Raises ValueError when ``json.loads`` would not
    take the body (bytes that are not UTF-8 excepted) or it is no object, RecursionError when it is nested too
    deep.
    """
    encoding = json.detect_encoding(body)
    try:
        decoded = body.decode(encoding, "surrogatepass")
    except UnicodeDecodeError:
        decoded = body.decode(encoding, "replace")
    value = json.loads(decoded, parse_constant=lambda _: None, parse_float=_finite)
    if not isinstance(value, dict):
        raise ValueError("the body is not a JSON object")
    kept = {key: value[key] for key in wanted if key in value}
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def is_ascii_superset(body: bytes) -> bool:
    """Whether quotes and brackets stand as single bytes, so that byte offsets of the body mean something."""
    return json.detect_encoding(body).startswith("utf-8")


def _finite(literal: str) -> float | None:
    value = float(literal)
    return value if math.isfinite(value) else None
