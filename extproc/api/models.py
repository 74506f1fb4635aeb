"""Bodies of GET /v1/models and /v1/models/{id}, which the gateway answers itself, in OpenAI's and Anthropic's
shape.

A model is (id, owned_by); ``created`` is in Unix seconds. Which shape: :func:`wants_anthropic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime


def wants_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether the client is Anthropic's: its SDKs send ``anthropic-version`` with every request."""
    return "anthropic-version" in headers


def listing(models: Sequence[tuple[str, str]], created: int) -> bytes:
    """Body of GET /v1/models for OpenAI clients."""
    data = [_openai(name, owner, created) for name, owner in models]
    return _json({"object": "list", "data": data})


def single(name: str, owned_by: str, created: int) -> bytes:
    """Body of GET /v1/models/{id} for OpenAI clients."""
    return _json(_openai(name, owned_by, created))


def anthropic_listing(models: Sequence[tuple[str, str]], created: int) -> bytes:
    """Body of GET /v1/models for Anthropic clients: always one whole page."""
    data = [_anthropic(name, created) for name, _ in models]
    first, last = (models[0][0], models[-1][0]) if models else (None, None)
    return _json({"data": data, "has_more": False, "first_id": first, "last_id": last})


def anthropic_single(name: str, created: int) -> bytes:
    """Body of GET /v1/models/{id} for Anthropic clients."""
    return _json(_anthropic(name, created))


def _openai(name: str, owner: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


def _anthropic(name: str, created: int) -> dict[str, object]:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def _json(value: object) -> bytes:
    return json.dumps(value).encode("ascii")
