"""How a stream of tokens is ended early so that clients take it for a reply cut at its token limit.

Shapes of the last events: OpenAI chat and completions (https://platform.openai.com/docs/api-reference/chat-streaming),
responses (``response.incomplete``, https://platform.openai.com/docs/api-reference/responses-streaming), Anthropic messages
(https://docs.anthropic.com/en/docs/build-with-claude/streaming). Identity, model and time are those of the first event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from extproc.api.request import Api

_SHARED = ("id", "created", "model", "system_fingerprint")
_DONE = b"data: [DONE]\n\n"
_LAST = re.compile(
    rb"(?:^|\n)(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|failed|incomplete)))\r?(?:\n|$)"
)
"""Whole lines: JSON text cannot hold a line break, so no token can look like one."""


def finished(events: bytes) -> bool:
    """Whether a stream's own last event is among these whole events."""
    if b"[DONE]" in events or b"message_stop" in events or b"response." in events:
        return _LAST.search(events) is not None
    return False


def ending(api: Api, first_event: bytes) -> bytes:
    """Events that end a stream which began with ``first_event`` (empty: nothing was sent yet)."""
    first = _data(first_event)
    if api is Api.MESSAGES:
        return _anthropic()
    if api is Api.RESPONSES:
        return _responses(first)
    shared = {name: first[name] for name in _SHARED if name in first}
    if api is Api.COMPLETIONS:
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        event = {**shared, "object": "text_completion", "choices": [choice]}
    else:
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
        event = {**shared, "object": "chat.completion.chunk", "choices": [choice]}
    return _event(event) + _DONE


def _responses(first: Mapping[str, Any]) -> bytes:
    response = first.get("response")
    body = dict(response) if isinstance(response, Mapping) else {"object": "response"}
    body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return _event({"type": "response.incomplete", "response": body}, "response.incomplete")


def _anthropic() -> bytes:
    delta = {"stop_reason": "max_tokens", "stop_sequence": None}
    return (
        _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        + _event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 0}}, "message_delta")
        + _event({"type": "message_stop"}, "message_stop")
    )


def _event(data: Mapping[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _data(event: bytes) -> Mapping[str, Any]:
    for line in event.splitlines():
        if line.startswith(b"data:"):
            try:
                found = msgspec.json.decode(line[5:])
            except msgspec.DecodeError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}
