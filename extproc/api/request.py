"""One client's request, reduced to what routing needs. The original bytes are never rebuilt from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Dialect(StrEnum):
    """Whose JSON an error must look like."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Api(StrEnum):
    """The family of an API path. ``OTHER`` is everything we pass through without reading a prompt."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    TOKENIZE = "tokenize"
    AUDIO = "audio"
    MODELS = "models"
    HEALTH = "health"
    OTHER = "other"

    @property
    def generates(self) -> bool:
        """True when the reply is made token by token (these teach TTFT and hold decode slots)."""
        return self in _GENERATIVE


_GENERATIVE = frozenset({Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES})


@dataclass(slots=True, frozen=True)
class RequestHead:
    """The header part of a request as Envoy shows it: lower-case names, last value wins, pseudo headers
    apart.
    """

    id: str
    method: str
    path: str
    """Path without the query string."""
    query: str
    headers: Mapping[str, str]
    """Without pseudo headers."""

    @property
    def has_no_bounded_body(self) -> bool:
        """True for requests that are decided on their headers even when more data follows: upgrades,
        CONNECT, gRPC.
        """
        return (
            self.method == "CONNECT"
            or "upgrade" in self.headers
            or self.headers.get("content-type", "").startswith("application/grpc")
        )


@dataclass(slots=True)
class Prompt:
    """The prompt in the order chat templates render it: tools, system, then the turns with their roles.

    ``pieces`` are UTF-8 bytes, each opened by a tag of its kind and role so that moving text between roles
    changes the bytes; media (images, audio, files) appear as digests. ``token_ids`` is set instead when the
    client sent tokens.
    """

    pieces: tuple[bytes, ...] = ()
    token_ids: tuple[int, ...] | None = None
    size: int = 0
    """Bytes of all pieces, or 4 per token id. Larger than the pieces where a request of abnormal shape was
    not read to its end: then at least the bytes it takes in the body.
    """
    media: int = 0
    """Number of media parts."""
    tokens: bytes | None = None
    """The whole prompt as the engine will tokenise it, four bytes a token in native order, where it is known."""


@dataclass(slots=True)
class InferenceRequest:
    """What a decision is made from. Filled by :func:`extproc.api.parse.parse`; ``model`` may be None
    (default pool).
    """

    head: RequestHead
    api: Api = Api.OTHER
    dialect: Dialect = Dialect.OPENAI
    model: str | None = None
    model_span: tuple[int, int] | None = None
    """Byte offsets [start, end) of the model's JSON string, quotes included, in ``plain`` or else in the
    body as sent.
    """
    stream: bool = False
    max_tokens: int | None = None
    """The client's own bound on output tokens, where given."""
    prompt: Prompt = field(default_factory=Prompt)
    session: str | None = None
    """Explicit session of the client (header or body field), for affinity."""
    user: str | None = None
    cache_salt: str = ""
    body_size: int = 0
    """Bytes of the body as sent."""
    plain: bytes | None = None
    """The decoded body when the client sent it compressed; None when it came plain or was not decoded."""
    unread: bool = False
    """The body may name another model than ``model``: it could not be read, or not to its end."""

    @property
    def id(self) -> str:
        """The request's identity everywhere: ``x-gateway-request-id``, made by Envoy."""
        return self.head.id
