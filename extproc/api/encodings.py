"""Content encodings, decoded for reading only: the body is forwarded as it came.

Every decoder stops at the caller's limit while it decodes, so that a small body which unpacks to gigabytes
costs no more than the limit. Blocking and CPU-bound: the edge calls this in a thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import brotli
import zstandard

_MOST_LAYERS = 4
_ZSTD_WINDOW = 8 << 20
"""RFC 9659: a zstd content coding needs no window above 8 MiB."""
_STEP = 1 << 20
_ZSTD_STEP = 512


class DecodeError(Exception):
    """The body cannot be read. ``reason`` is one of ``unknown_encoding``, ``corrupt``, ``truncated``,
    ``too_large``.
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
    while body:
        member, body = _inflate(body, 31, left)
        out.append(member)
        left -= len(member)
        body = body.lstrip(b"\0")
    return b"".join(out)


def _deflate(body: bytes, limit: int) -> bytes:
    try:
        plain, rest = _inflate(body, 15, limit)
    except DecodeError as error:
        if error.reason != "corrupt":
            raise
        plain, rest = _inflate(body, -15, limit)
    if rest:
        raise DecodeError("corrupt")
    return plain


def _inflate(body: bytes, window_bits: int, limit: int) -> tuple[bytes, bytes]:
    """Output of one zlib stream and the bytes after it."""
    decoder = zlib.decompressobj(window_bits)
    try:
        plain = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise DecodeError("corrupt") from error
    if len(plain) > limit:
        raise DecodeError("too_large")
    if not decoder.eof:
        raise DecodeError("truncated")
    return plain, decoder.unused_data


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
    position = 0
    try:
        while position < len(body):
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
