"""Request bodies: decoding and reading as JSON."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import brotli
import msgspec
import zstandard
from aiohttp import web

from extproc.simulator.api_error import ApiError

_MODEL_FIELD = re.compile(rb'name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n')


def decoded(raw: bytes, encoding: str) -> bytes:
    """The body without its content encoding.

    Raises:
        ApiError: 415 for an unknown encoding, 400 for one that does not fit the body.
    """
    try:
        match encoding.strip().lower():
            case "" | "identity":
                return raw
            case "gzip":
                return zlib.decompress(raw, 16 + zlib.MAX_WBITS)
            case "deflate":
                return zlib.decompress(raw)
            case "br":
                return bytes(brotli.decompress(raw))
            case "zstd":
                return zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    except (zlib.error, brotli.error, zstandard.ZstdError) as error:
        raise ApiError(400, f"the body is not {encoding}") from error
    raise ApiError(415, f"content encoding {encoding} is not supported")


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 400 when it is none.
    """
    plain = decoded(await request.read(), request.headers.get("content-encoding", ""))
    try:
        value = msgspec.json.decode(plain)
    except msgspec.DecodeError:
        # The strict parser refuses NaN and lone surrogates, which Python's own, and so vLLM, takes.
        try:
            value = json.loads(plain)
        except ValueError as error:
            raise ApiError(400, f"JSON decode error: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def form_model(raw: bytes) -> str | None:
    """The ``model`` field of a multipart body."""
    found = _MODEL_FIELD.search(raw)
    return found.group(1).decode("utf-8", "replace") if found else None
