"""What a generative request asks for, read from the bodies of four APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from extproc.simulator import tokens
from extproc.simulator.api_error import ApiError


@dataclass(slots=True, frozen=True)
class Generation:
    """One request: one or more prompts, each answered by one choice."""

    prompts: tuple[bytes, ...]
    """Tokenised."""
    output_tokens: int
    limited: bool
    """The reply ends because the client's bound is reached, not by itself."""
    stream: bool
    include_usage: bool
    chunk_tokens: int
    separate: bool
    """Write every SSE event by itself instead of all that are due at once."""
    salt: str
    priority: int


@dataclass(slots=True, frozen=True)
class Defaults:
    """What holds when the body does not say."""

    output_tokens: int
    chunk_tokens: int


def chat(body: dict[str, Any], defaults: Defaults) -> Generation:
    """/v1/chat/completions."""
    if not isinstance(body.get("messages"), list):
        raise ApiError(400, "messages must be a list", param="messages")
    pieces = tokens.chat_pieces(body["messages"], body.get("tools"))
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    return _generation(body, (tokens.tokenise(pieces),), limit, defaults)


def completions(body: dict[str, Any], defaults: Defaults) -> Generation:
    """/v1/completions: a string, token ids, or a list of either."""
    return _generation(body, prompts_of(body.get("prompt")), body.get("max_tokens"), defaults)


def responses(body: dict[str, Any], defaults: Defaults) -> Generation:
    """/v1/responses."""
    given = body.get("input")
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(turns, list):
        raise ApiError(400, "input must be a string or a list", param="input")
    pieces = tokens.chat_pieces(turns, body.get("tools"), body.get("instructions"))
    return _generation(body, (tokens.tokenise(pieces),), body.get("max_output_tokens"), defaults)


def messages(body: dict[str, Any], defaults: Defaults) -> Generation:
    """/v1/messages (Anthropic)."""
    if not isinstance(body.get("messages"), list):
        raise ApiError(400, "messages must be a list", param="messages")
    pieces = tokens.chat_pieces(body["messages"], body.get("tools"), body.get("system"))
    return _generation(body, (tokens.tokenise(pieces),), body.get("max_tokens"), defaults)


def prompts_of(prompt: Any) -> tuple[bytes, ...]:
    """The prompts of a completion or embedding request, tokenised."""
    if isinstance(prompt, str):
        return (tokens.tokenise(tokens.text_pieces(prompt)),)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(one, int) for one in prompt):
            return (tokens.from_ids(prompt),)
        return tuple(token for one in prompt for token in prompts_of(one))
    raise ApiError(400, "the prompt must be a string, token ids, or a list of either", param="prompt")


def _generation(
    body: dict[str, Any], prompts: tuple[bytes, ...], limit: object, defaults: Defaults
) -> Generation:
    bound = _count(limit, "max_tokens", 1, None)
    output = _count(body.get("min_tokens"), "min_tokens", 0, 0) or 0
    output = max(output, defaults.output_tokens if bound is None else bound, 1)
    options = body.get("stream_options")
    return Generation(
        prompts=tuple(prompt or b"\0\0\0\0" for prompt in prompts),
        output_tokens=output,
        limited=bound is not None,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        chunk_tokens=_count(body.get("chunk_tokens"), "chunk_tokens", 1, None) or defaults.chunk_tokens,
        separate=bool(body.get("separate_chunks")),
        salt=str(body.get("cache_salt") or ""),
        priority=_count(body.get("priority"), "priority", -(2**31), 0) or 0,
    )


def _count(value: object, name: str, low: int, default: int | None) -> int | None:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ApiError(400, f"{name} must be an integer of at least {low}", param=name)
    return value
