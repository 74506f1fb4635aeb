"""Replies of the generative APIs: whole, and as server-sent events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from extproc.simulator.generation import Generation

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, frozen=True)
class Usage:
    """Tokens of one reply."""

    prompt: int
    completion: int
    cached: int

    def openai(self) -> dict[str, Any]:
        """As chat and text completions show it."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Dialect(Protocol):
    """One API's way to say a reply."""

    def opening(self, usage: Usage) -> list[bytes]:
        """Events that come with the first token, before it; ``usage`` is that of the prompt."""

    def delta(self, index: int, text: str, last: bool) -> bytes:
        """The event of some tokens of choice ``index``; ``last`` for its last one."""

    def closing(self, texts: list[str], usage: Usage) -> list[bytes]:
        """Events after the last token."""

    def whole(self, texts: list[str], usage: Usage) -> dict[str, Any]:
        """The reply in one piece."""


class Chat:
    """Chat completions."""

    def __init__(self, id_: str, model: str, generation: Generation) -> None:
        self._base = {"id": f"chatcmpl-{id_}", "object": "chat.completion.chunk", "created": int(time.time())}
        self._base |= {"model": model}
        self._reason = "length" if generation.limited else "stop"
        self._include_usage = generation.include_usage
        head = msgspec.json.encode(self._base)[:-1]
        self._before = b'data: %s,"choices":[{"index":0,"delta":{"content":"' % head
        self._after = b'"},"logprobs":null,"finish_reason":null}]}\n\n'
        self._after_last = b'"},"logprobs":null,"finish_reason":"%s"}]}\n\n' % self._reason.encode()

    def opening(self, usage: Usage) -> list[bytes]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return [_data(self._base | {"choices": [choice]})]

    def delta(self, index: int, text: str, last: bool) -> bytes:
        """Some tokens."""
        return self._before + text.encode() + (self._after_last if last else self._after)

    def closing(self, texts: list[str], usage: Usage) -> list[bytes]:
        """Usage when asked for, then [DONE]."""
        final = [_data(self._base | {"choices": [], "usage": usage.openai()})] if self._include_usage else []
        return [*final, _DONE]

    def whole(self, texts: list[str], usage: Usage) -> dict[str, Any]:
        """A chat.completion."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "tool_calls": []},
                "logprobs": None,
                "finish_reason": self._reason,
            }
            for index, text in enumerate(texts)
        ]
        return self._base | {"object": "chat.completion", "choices": choices, "usage": usage.openai()}


class Completions:
    """Text completions; one choice a prompt."""

    def __init__(self, id_: str, model: str, generation: Generation) -> None:
        self._base = {"id": f"cmpl-{id_}", "object": "text_completion", "created": int(time.time())}
        self._base |= {"model": model}
        self._reason = "length" if generation.limited else "stop"
        self._include_usage = generation.include_usage
        self._head = msgspec.json.encode(self._base)[:-1]

    def opening(self, usage: Usage) -> list[bytes]:
        """Nothing comes before the first token."""
        return []

    def delta(self, index: int, text: str, last: bool) -> bytes:
        """Some tokens."""
        reason = f'"{self._reason}"' if last else "null"
        choice = f'{{"index":{index},"text":"{text}","logprobs":null,"finish_reason":{reason}}}'
        return b'data: %s,"choices":[%s]}\n\n' % (self._head, choice.encode())

    def closing(self, texts: list[str], usage: Usage) -> list[bytes]:
        """Usage when asked for, then [DONE]."""
        final = [_data(self._base | {"choices": [], "usage": usage.openai()})] if self._include_usage else []
        return [*final, _DONE]

    def whole(self, texts: list[str], usage: Usage) -> dict[str, Any]:
        """A text_completion."""
        choices = [
            {"index": index, "text": text, "logprobs": None, "finish_reason": self._reason}
            for index, text in enumerate(texts)
        ]
        return self._base | {"choices": choices, "usage": usage.openai()}


class Responses:
    """OpenAI's responses API: named events with a sequence number."""

    def __init__(self, id_: str, model: str, generation: Generation) -> None:
        self._base: dict[str, Any] = {
            "id": f"resp_{id_}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
        }
        self._item = f"msg_{id_}"
        self._limited = generation.limited
        self._sequence = -1

    def opening(self, usage: Usage) -> list[bytes]:
        """The response, its one message and the message's one part begin."""
        begun = self._base | {"status": "in_progress", "output": [], "usage": None}
        return [
            self._event("response.created", {"response": begun}),
            self._event("response.in_progress", {"response": begun}),
            self._event(
                "response.output_item.added", {"output_index": 0, "item": self._message("in_progress", [])}
            ),
            self._event("response.content_part.added", self._place() | {"part": _output_text("")}),
        ]

    def delta(self, index: int, text: str, last: bool) -> bytes:
        """Some tokens."""
        return self._event("response.output_text.delta", self._place() | {"delta": text, "logprobs": []})

    def closing(self, texts: list[str], usage: Usage) -> list[bytes]:
        """Part, message and response end."""
        text = texts[0]
        done = self._message("completed", [_output_text(text)])
        end = "response.incomplete" if self._limited else "response.completed"
        return [
            self._event("response.output_text.done", self._place() | {"text": text, "logprobs": []}),
            self._event("response.content_part.done", self._place() | {"part": _output_text(text)}),
            self._event("response.output_item.done", {"output_index": 0, "item": done}),
            self._event(end, {"response": self.whole(texts, usage)}),
        ]

    def whole(self, texts: list[str], usage: Usage) -> dict[str, Any]:
        """A response."""
        status = "incomplete" if self._limited else "completed"
        return self._base | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._limited else None,
            "output": [self._message(status, [_output_text(texts[0])])],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, values: dict[str, Any]) -> bytes:
        self._sequence += 1
        return _named(kind, {"type": kind, "sequence_number": self._sequence} | values)


class Messages:
    """Anthropic's messages API."""

    def __init__(self, id_: str, model: str, generation: Generation) -> None:
        self._base: dict[str, Any] = {
            "id": f"msg_{id_}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "stop_sequence": None,
        }
        self._reason = "max_tokens" if generation.limited else "end_turn"

    def opening(self, usage: Usage) -> list[bytes]:
        """The message and its one block begin."""
        begun = self._base | {"content": [], "stop_reason": None, "usage": self._usage(usage)}
        block = {"type": "text", "text": ""}
        return [
            _named("message_start", {"type": "message_start", "message": begun}),
            _named(
                "content_block_start", {"type": "content_block_start", "index": 0, "content_block": block}
            ),
        ]

    def delta(self, index: int, text: str, last: bool) -> bytes:
        """Some tokens."""
        delta = {"type": "text_delta", "text": text}
        return _named("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, texts: list[str], usage: Usage) -> list[bytes]:
        """Block and message end."""
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        return [
            _named("content_block_stop", {"type": "content_block_stop", "index": 0}),
            _named("message_delta", {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}),
            _named("message_stop", {"type": "message_stop"}),
        ]

    def whole(self, texts: list[str], usage: Usage) -> dict[str, Any]:
        """A message."""
        content = [{"type": "text", "text": texts[0]}]
        return self._base | {"content": content, "stop_reason": self._reason, "usage": self._usage(usage)}

    @staticmethod
    def _usage(usage: Usage) -> dict[str, Any]:
        # Anthropic counts cached tokens apart from input_tokens.
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _data(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _named(kind: str, value: object) -> bytes:
    return b"event: " + kind.encode() + b"\n" + _data(value)
