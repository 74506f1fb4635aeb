"""Small form fields of a multipart body (RFC 7578), such as an audio upload's ``model``, without touching its
files.

Only part headers are looked at; from one boundary to the next is a byte search, so a 25 MB file costs one
pass and no copy.
"""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r';[ \t]*boundary="?([^";,]{1,200})', re.IGNORECASE)
_NAME = re.compile(rb'^content-disposition:[^\r\n]*?;[ \t]*name="?([^";\r\n]*)', re.IGNORECASE | re.MULTILINE)
_FILENAME = re.compile(rb"^content-disposition:[^\r\n]*?;[ \t]*filename\*?=", re.IGNORECASE | re.MULTILINE)
_MOST_PARTS = 64
_MOST_HEAD = 4096
_MOST_VALUE = 1024


def form_fields(body: bytes, content_type: str, wanted: frozenset[str]) -> tuple[dict[str, str], bool]:
    """Values of the ``wanted`` form-data fields, and whether the form was read to its end; parts with a file
    name, long values and bad UTF-8 are left out.

    Bounded: at most 64 parts, 4 KiB of part headers, 1 KiB a value. A malformed body gives what was found
    before.
    """
    fields: dict[str, str] = {}
    found = _BOUNDARY.search(content_type)
    if not found:
        return fields, False
    marker = b"--" + found[1].strip().encode("utf-8", "replace")
    position = 0 if body.startswith(marker) else _after(body, b"\r\n" + marker, 0) - len(marker)
    for _ in range(_MOST_PARTS):
        start = position + len(marker)
        if position >= 0 and body[start : start + 2] == b"--":
            return fields, True
        if position < 0 or body[start : start + 2] != b"\r\n":
            break
        head_end = body.find(b"\r\n\r\n", start, start + _MOST_HEAD)
        if head_end < 0:
            break
        following = body.find(b"\r\n" + marker, head_end + 2)
        if following < 0:
            break
        head = body[start + 2 : head_end + 2]
        name = _NAME.search(head)
        value_start = head_end + 4
        if name and not _FILENAME.search(head) and following - value_start <= _MOST_VALUE:
            key = name[1].decode("utf-8", "replace")
            if key in wanted:
                try:
                    fields[key] = body[value_start:following].decode("utf-8")
                except UnicodeDecodeError:
                    fields.pop(key, None)
        position = following + 2
    return fields, False


def _after(body: bytes, needle: bytes, start: int) -> int:
    found = body.find(needle, start)
    return found + len(needle) if found >= 0 else -1
