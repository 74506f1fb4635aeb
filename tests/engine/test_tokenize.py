"""Our tokens are vLLM's: for every conversation here, what we make of a request's body equals its own ``/tokenize``."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.api.request import Api
from extproc.edge.tokenizer_files import ModelTokenizer, load
from tests.engine.vllm_server import MODEL, Vllm

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATES = Path(__file__).parent / "templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Täglich: 天气 <b>"now"</b>',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}},
            "required": ["city"],
        },
    },
}
BARE = {"type": "function", "function": {"name": "now", "strict": True}, "extra": 1}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
        }
    ],
}
USER = {"role": "user", "content": "What is the weather in Köln?\n\n  Please, 123456 words!  "}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [USER]},
    "system and turns": {
        "messages": [
            {"role": "system", "content": "You are brief."},
            USER,
            {"role": "assistant", "content": "Rain."},
            {"role": "user", "content": "And tomorrow? 😀 漢字"},
        ]
    },
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "first"}, {"type": "text", "text": " second"}],
            }
        ]
    },
    "tools": {"messages": [USER], "tools": [WEATHER, BARE]},
    "tool calls and their results": {
        "messages": [
            {"role": "system", "content": "Use tools."},
            USER,
            CALL,
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
            {"role": "assistant", "content": "It rains.", "reasoning": "\nlooked it up\n"},
            USER,
        ],
        "tools": [WEATHER],
    },
    "arguments that are no JSON": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{broken"}}
                ],
            },
            USER,
        ]
    },
    "developer": {"messages": [USER, {"role": "developer", "content": "Be brief."}, USER]},
    "billing header": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."}, USER]
    },
    "thinking off": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "special tokens in the text": {
        "messages": [{"role": "user", "content": "<｜begin▁of▁sentence｜> <|im_end|> <|assistant|>"}]
    },
    "special tokens around": {"messages": [USER], "add_special_tokens": True},
    "long": {"messages": [{"role": "user", "content": "All work and no play. " * 600}]},
}


def ours(tokenizer: ModelTokenizer, api: Api, body: dict[str, Any]) -> list[int] | None:
    found = tokenizer.tokens(api, json.dumps(body, ensure_ascii=False).encode())
    return None if found is None else array("I", found).tolist()


def tokenizer_with(vllm: Vllm, tmp_path: Path, template: str | None) -> ModelTokenizer:
    folder = vllm.folder / "model"
    if template is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).symlink_to(folder / name)
        (tmp_path / "chat_template.jinja").write_text((TEMPLATES / template).read_text())
        folder = tmp_path
    return load(folder, max_tokens=1_000_000)


@pytest.mark.parametrize("template", [None, "chatml_tools.jinja", "parts.jinja"])
async def test_chats_are_tokenised_as_vllm_does(vllm: Vllm, tmp_path: Path, template: str | None) -> None:
    tokenizer = tokenizer_with(vllm, tmp_path, template)
    differ = []
    for name, conversation in CONVERSATIONS.items():
        asked = {"model": MODEL, **conversation}
        if template is not None:
            asked["chat_template"] = (TEMPLATES / template).read_text()
        theirs = (await vllm.post("/tokenize", asked))["tokens"]
        if ours(tokenizer, Api.CHAT, {"model": MODEL, **conversation}) != theirs:
            differ.append(name)
    assert not differ


async def test_a_growing_conversation_stays_equal(vllm: Vllm, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(vllm, tmp_path, None)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Rules: " + "be kind, " * 300}]
    for turn in range(8):
        messages.append({"role": "user", "content": f"Question {turn}? " + f"a{turn}b " * 150})
        theirs = (await vllm.post("/tokenize", {"model": MODEL, "messages": messages}))["tokens"]
        assert ours(tokenizer, Api.CHAT, {"messages": messages}) == theirs
        messages.append({"role": "assistant", "content": f"Answer {turn}. " + "really " * 100})
    assert tokenizer.memo.known_chars > 2 * tokenizer.memo.new_chars


@pytest.mark.parametrize("text", ["Once upon a time", "", " leading and trailing ", "漢字\n\n😀", "x" * 5000])
async def test_prompts_are_tokenised_as_vllm_does(vllm: Vllm, tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_with(vllm, tmp_path, None)
    for special in (True, False):
        body = {"model": MODEL, "prompt": text, "add_special_tokens": special}
        theirs = (await vllm.post("/tokenize", body))["tokens"]
        assert ours(tokenizer, Api.COMPLETIONS, body) == theirs
