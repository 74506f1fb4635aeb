"""Content encodings, decoded for reading only: the body is forwarded as it came.

Every decoder stops at the caller's limit while it decodes, so that a small body which unpacks to gigabytes
costs no more than the limit; it also stops after so many members or frames, since a body of millions of empty
ones would unpack to nothing and take minutes. Blocking and CPU-bound: the edge calls this in a thread.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import brotli
import zstandard

_MOST_LAYERS = 4
_ZSTD_WINDOW = 8 << 20
"""RFC 9659: a zstd content coding needs no window above 8 MiB."""
_MOST_FRAMES = 4096
"""Members of a gzip body, frames of a zstd one: enough for 256 MiB in the 64 KiB members of `bgzip`."""
_STEP = 1 << 20
_GZIP_STEP = 1 << 16
_ZSTD_STEP = 512
_PADDING = re.compile(rb"\0*+")


class DecodeError(Exception):
    """The body cannot be read. ``reason`` is one of ``unknown_encoding``, ``corrupt``, ``truncated``,
    ``too_large``, ``too_many_frames``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a ``content-encoding`` header value (RFC 9110 section 8.4: a comma list, applied in order; case
    does not matter).

    Knows gzip, x-gzip, deflate (zlib and, as some clients send it, raw), br, zstd and identity. Raises
    :class:`DecodeError` also when any layer's output is larger than ``limit`` bytes. Empty stays empty.
    """
    layers = [name for part in encoding.split(",") if (name := part.strip().lower()) not in ("", "identity")]
    if len(layers) > _MOST_LAYERS or any(name not in _DECODERS for name in layers):
        raise DecodeError("unknown_encoding")
    for name in reversed(layers):
        if body:
            body = _DECODERS[name](body, limit)
    if len(body) > limit:
        raise DecodeError("too_large")
    return body


def _gzip(body: bytes, limit: int) -> bytes:
    """RFC 1952: one or more members after each other, perhaps padded with zero bytes."""
    out: list[bytes] = []
    left = limit
    position = 0
    for _ in range(_MOST_FRAMES):
        member, position = _inflate(body, position, 31, left)
        out.append(member)
        left -= len(member)
        if padding := _PADDING.match(body, position):
            position = padding.end()
        if position == len(body):
            return b"".join(out)
    raise DecodeError("too_many_frames")


def _deflate(body: bytes, limit: int) -> bytes:
    try:
        plain, end = _inflate(body, 0, 15, limit)
    except DecodeError as error:
        if error.reason != "corrupt":
            raise
        plain, end = _inflate(body, 0, -15, limit)
    if end < len(body):
        raise DecodeError("corrupt")
    return plain


def _inflate(body: bytes, position: int, window_bits: int, limit: int) -> tuple[bytes, int]:
    """Output of the zlib stream that begins at ``position``, and where it ends.

    The decoder copies what it was given and did not need: it gets the body in steps.
    """
    decoder = zlib.decompressobj(window_bits)
    out: list[bytes] = []
    left = limit
    try:
        while not decoder.eof:
            step = body[position : position + _GZIP_STEP]
            if not step:
                raise DecodeError("truncated")
            piece = decoder.decompress(step, left + 1)
            position += len(step) - len(decoder.unused_data)
            out.append(piece)
            left -= len(piece)
            if left < 0:
                raise DecodeError("too_large")
    except zlib.error as error:
        raise DecodeError("corrupt") from error
    return b"".join(out), position


def _brotli(body: bytes, limit: int) -> bytes:
    decoder = brotli.Decompressor()
    out: list[bytes] = []
    size = 0
    data = body
    try:
        while not decoder.is_finished():
            piece = decoder.process(data, output_buffer_limit=min(limit + 1, _STEP))
            data = b""
            if not piece and decoder.can_accept_more_data():
                raise DecodeError("truncated")
            out.append(piece)
            size += len(piece)
            if size > limit:
                raise DecodeError("too_large")
    except brotli.error as error:
        raise DecodeError("corrupt") from error
    return b"".join(out)


def _zstd(body: bytes, limit: int) -> bytes:
    """RFC 8878: one or more frames after each other.

    The library's frame decoder tells a cut frame from a whole one but has no output limit. A block makes at
    most 128 KiB of at least 4 bytes, so feeding few bytes at a time bounds what one call can make to 16 MiB.
    """
    out: list[bytes] = []
    size = 0
    position = frames = 0
    try:
        while position < len(body):
            frames += 1
            if frames > _MOST_FRAMES:
                raise DecodeError("too_many_frames")
            decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
            while not decoder.eof:
                step = body[position : position + _ZSTD_STEP]
                if not step:
                    raise DecodeError("truncated")
                piece = decoder.decompress(step)
                position += len(step) - len(decoder.unused_data)
                out.append(piece)
                size += len(piece)
                if size > limit:
                    raise DecodeError("too_large")
    except zstandard.ZstdError as error:
        raise DecodeError("corrupt") from error
    return b"".join(out)


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
