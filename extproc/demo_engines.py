"""Engines that ``extproc demo --engine`` is put in front of: what people write, where it is, what it serves."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

_ANSWER_S = 5.0


class EngineError(Exception):
    """The demo cannot use an engine; the message says which and why, in a line."""


@dataclass(slots=True, frozen=True)
class Engine:
    """An engine that answers."""

    address: str
    """HOST:PORT."""
    models: tuple[str, ...]


def engine_url(said: str) -> str:
    """``http://HOST:PORT`` of what people write: with or without scheme, with the ``/v1`` of OpenAI clients.

    Raises:
        EngineError: it is no such address.
    """
    url = said.strip() if "://" in said else f"http://{said.strip()}"
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise EngineError(f"--engine {said}: write http://HOST:PORT ({error})") from error
    if parts.scheme == "https":
        raise EngineError(
            f"--engine {said}: the demo speaks plain http to engines. For TLS run Envoy yourself and give the "
            "engine's cluster a transport_socket: docs/envoy.md"
        )
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.username:
        raise EngineError(f"--engine {said}: write http://HOST:PORT")
    if parts.path.rstrip("/") not in ("", "/v1"):
        raise EngineError(f"--engine {said}: the engine's API must be at /v1; write http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{port}"


async def look(said: Sequence[str], model: str | None = None) -> list[Engine]:
    """Ask each engine what it serves. ``model``: only this one, and only engines that serve it.

    Raises:
        EngineError: one does not answer as it should, or none serves ``model``.
    """
    urls = list(dict.fromkeys(engine_url(each) for each in said))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session:
        served = [await _models(session, url) for url in urls]
    found = [Engine(url.removeprefix("http://"), names) for url, names in zip(urls, served, strict=True)]
    if model is None:
        _tell_apart(found)
        return found
    chosen = [Engine(engine.address, (model,)) for engine in found if model in engine.models]
    if not chosen:
        names = dict.fromkeys(name for engine in found for name in engine.models)
        raise EngineError(f"--model {model}: no engine serves it; they serve {', '.join(names)}")
    return chosen


async def _models(session: aiohttp.ClientSession, url: str) -> tuple[str, ...]:
    asked = f"{url}/v1/models"
    try:
        async with session.get(asked) as reply:
            if reply.status != 200:
                raise EngineError(f"{asked}: answers {reply.status} {reply.reason or ''}".rstrip())
            names = _names(await reply.json(content_type=None))
    except EngineError:
        raise
    except TimeoutError as error:
        raise EngineError(f"{asked}: no answer in {_ANSWER_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"{asked}: {_why(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{asked}: the answer is not an OpenAI list of models") from error
    if not names:
        raise EngineError(f"{asked}: the engine serves no models")
    return names


def _names(answer: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(item["id"]) for item in answer["data"]))


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host's name is not known here"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        if number == errno.ECONNREFUSED:
            return "connection refused; is the engine running?"
        return f"no connection: {error.os_error.strerror or error.os_error}"
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError)):
        return "the connection was closed without an answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers there does not speak HTTP"
    return str(error) or type(error).__name__


def _tell_apart(found: Sequence[Engine]) -> None:
    """Engines that share a model share a pool, and everything in a pool must serve the same.

    Raises:
        EngineError: two serve one model in common and others not.
    """
    for position, one in enumerate(found):
        for other in found[position + 1 :]:
            common = [name for name in one.models if name in other.models]
            if common and set(one.models) != set(other.models):
                raise EngineError(
                    f"{one.address} and {other.address} both serve {common[0]}, but not all the same models: "
                    f"choose one with --model {common[0]}"
                )
