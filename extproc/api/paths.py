"""Which API a path belongs to, whatever stands before it: ``/v1/chat/completions``, ``/chat/completions``,
``/openai/v1/…``.

Rules of this file:

- the longest known ending of the path decides; a path prefix is opaque, a trailing slash does not matter;
- the families that make tokens, and all that carry a prompt, are POST only: ``GET /v1/responses/{id}`` is
  OTHER;
- a percent-encoded letter is that letter, as engines see it;
- an unknown path is never refused: it is OTHER, in OpenAI's dialect, and passes through;
- ``/messages`` counts only at the root or after a version (``/v1/threads/{id}/messages`` is not Anthropic's).
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from extproc.api.request import Api, Dialect

_ENDINGS: dict[tuple[str, ...], Api] = {
    ("chat", "completions"): Api.CHAT,
    ("completions",): Api.COMPLETIONS,
    ("responses",): Api.RESPONSES,
    ("embeddings",): Api.EMBEDDINGS,
    ("pooling",): Api.EMBEDDINGS,
    ("classify",): Api.EMBEDDINGS,
    ("rerank",): Api.RERANK,
    ("score",): Api.SCORE,
    ("tokenize",): Api.TOKENIZE,
    ("detokenize",): Api.TOKENIZE,
    ("audio", "transcriptions"): Api.AUDIO,
    ("audio", "translations"): Api.AUDIO,
    ("audio", "speech"): Api.AUDIO,
}
_MESSAGES = re.compile(r"(?:^|/v\d+)/messages(/count_tokens)?$")
_MODELS = re.compile(r"^(?:(?:/[^/]+)*?/v1)?/models(?:/(?P<id>.+))?$")
_READS = frozenset({"GET", "HEAD"})


def classify(method: str, path: str) -> tuple[Api, Dialect]:
    """The API family and the dialect of its errors; ``path`` is without the query string."""
    if method == "POST" and (usual := _USUAL.get(path)) is not None:
        return usual
    return _classify(method, path)


def _classify(method: str, path: str) -> tuple[Api, Dialect]:
    path = unquote(path, errors="replace").rstrip("/") or "/"
    if method in _READS:
        if path == "/health":
            return Api.HEALTH, Dialect.OPENAI
        return (Api.MODELS if _MODELS.match(path) else Api.OTHER), Dialect.OPENAI
    if method != "POST":
        return Api.OTHER, Dialect.OPENAI
    messages = _MESSAGES.search(path)
    if messages:
        return (Api.TOKENIZE if messages[1] else Api.MESSAGES), Dialect.ANTHROPIC
    segments = tuple(path.rsplit("/", 2)[-2:])
    return _ENDINGS.get(segments) or _ENDINGS.get(segments[-1:], Api.OTHER), Dialect.OPENAI


_USUAL = {
    path: _classify("POST", path) for path in ("/v1/messages", *("/v1/" + "/".join(e) for e in _ENDINGS))
}
"""Answers for the paths that nearly all requests have, known beforehand: each is asked for twice a request."""


def own_answer(method: str, path: str) -> Api | None:
    """``MODELS`` or ``HEALTH`` when the gateway answers this request itself, else None (it goes to an
    engine).
    """
    api, _ = classify(method, path)
    return api if api in (Api.MODELS, Api.HEALTH) else None


def model_id(path: str) -> str | None:
    """The model a ``…/models/{id}`` path asks for, percent-decoded (ids may contain slashes); None for the
    list.
    """
    match = _MODELS.match(path.rstrip("/"))
    return unquote(match["id"], errors="replace") if match and match["id"] else None
