"""What is known of the engines beyond their metrics: their events, their tokens, their sessions, their roles."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from extproc.config.schema.base import Duration, Section, Table, shown, wrong

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Field(gt=0)


class KvEvents(Section):
    """KV-cache events of engines whose cluster metadata says `kv_events_port`."""

    max_blocks: Annotated[int, Field(ge=1000)] = 2_000_000
    """KV blocks remembered over all endpoints, some 300 bytes each. An endpoint for whose blocks there was no
    room is partly approximate until it restarts."""
    replay_timeout: Annotated[Duration, Positive] = 5.0
    """How long an engine may be silent while it replays events."""
    worth: Annotated[dict[str, Share], Table] = Field(
        default_factory=lambda: {"CPU": 0.7, "STORAGE": 0.4, "DISK": 0.4}
    )
    """Medium, as events name it: what a token cached there saves, compared with one on the GPU. Media that are
    not listed count as nothing."""


class Tokenizers(Section):
    """Tokenizing prompts as the engines do, for pools that have a `tokenizer`."""

    threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads for all pools."""
    deadline: Annotated[Duration, Positive] = 0.02
    """How long a request waits for its tokens. After that it is routed by the approximate index."""
    memory: Annotated[int, Field(ge=0)] = 4_000_000
    """Tokens remembered a pool, so that a conversation that goes on is not tokenized again."""


class Sessions(Section):
    """Conversations that name themselves: header `X-Session-Id`, or a body's `session_id`, `prompt_cache_key` or
    `conversation`."""

    ttl: Annotated[Duration, Positive] = 1800.0
    """How long after its last request a session's endpoint is remembered."""
    max_sessions: Annotated[int, Field(ge=1)] = 100_000
    """Sessions remembered; the longest unused are forgotten first."""
    saves: Duration = 0.05
    """What staying on its endpoint is worth to a session, in seconds, beside the prompt that is known to be cached
    there. 0 turns the hint off."""


class Disaggregation(Section):
    """Prefill on one endpoint, decode on another, in pools whose endpoints have `role: prefill` and
    `role: decode`."""

    header: Annotated[str, Field(min_length=1, max_length=256)] = "x-prefiller-host-port"
    """Request header that names the prefill endpoint, as `host:port`."""
    min_uncached_tokens: Annotated[int, Field(ge=0)] = 512
    """Prompt tokens that the decode endpoint does not hold, below which it prefills them itself."""
    transfer_tokens_per_second: Annotated[float, Positive] = 100_000.0
    """How fast a prefilled prompt's KV cache reaches the decode endpoint."""

    @field_validator("header")
    @classmethod
    def _is_a_name(cls, header: str) -> str:
        if not header.replace("-", "").replace("_", "").isalnum() or not header.isascii():
            raise wrong(f"`{shown(header)}` is no header name; write one like `x-prefiller-host-port`")
        return header.lower()
