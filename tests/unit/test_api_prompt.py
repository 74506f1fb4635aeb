"""Prompt pieces: every form, tags that text cannot imitate, growth that keeps every earlier byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.parse import parse
from extproc.api.request import Prompt, RequestHead

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}


def prompt(path: str, body: object) -> Prompt:
    head = RequestHead("id", "POST", path, "", {"content-type": "application/json"})
    return parse(head, json.dumps(body).encode()).prompt


def chat(*messages: object, **keys: object) -> Prompt:
    return prompt(CHAT, {"model": "m", "messages": list(messages), **keys})


def turn(**message: object) -> bytes:
    return b"".join(chat(message).pieces)


def test_a_turn_is_its_role_and_its_text() -> None:
    made = chat({"role": "system", "content": "Be kind."}, {"role": "user", "content": 'Grüß\n"Gott"'})
    assert made.pieces == (b"\xffsystem\xfeBe kind.", b"\xffuser\xfe" + 'Grüß\n"Gott"'.encode())
    assert made.size == sum(map(len, made.pieces))
    assert (made.media, made.token_ids) == (0, None)


def test_tools_come_before_the_turns_as_they_are_written() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = chat({"role": "user", "content": "x"}, tools=tools)
    assert made.pieces[0] == b"\xfatools\xfe" + json.dumps(tools).encode()


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_no_piece(tools: object) -> None:
    assert chat({"role": "user", "content": "x"}, tools=tools).pieces == (b"\xffuser\xfex",)


@pytest.mark.parametrize("content", [None, "", []])
def test_empty_content_is_the_role_alone(content: object) -> None:
    assert turn(role="assistant", content=content) == turn(role="assistant") == b"\xffassistant\xfe"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_a_single_text_part_is_the_same_as_a_string(kind: str) -> None:
    assert turn(role="user", content=[{"type": kind, "text": "hi"}]) == turn(role="user", content="hi")
    assert turn(role="user", content=[{"text": "hi", "cache_control": {"type": "ephemeral"}}]) == turn(
        role="user", content="hi"
    )
    assert turn(role="user", content=["hi"]) == turn(role="user", content="hi")


def test_parts_are_kept_apart() -> None:
    two = turn(role="user", content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert two == b"\xffuser\xfea\xfdb"
    assert two != turn(role="user", content="ab")


def test_moving_text_between_roles_changes_bytes() -> None:
    assert turn(role="user", content="x") != turn(role="system", content="x")
    both = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert b"".join(chat(*both).pieces) != turn(role="user", content="aassistantb")


def test_media_become_digests() -> None:
    made = chat({"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]})
    assert made.media == 1
    assert made.size == len(b"\xffuser\xfesee") + 17
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4999 + "B"}}
    assert turn(role="user", content=[IMAGE]) != turn(role="user", content=[other])
    assert turn(role="user", content=[IMAGE]) == turn(role="user", content=[dict(IMAGE)])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "http://x"}},
        {"type": "video_url", "video_url": {"url": "http://x"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "zzz"},
        {"type": 7, "text": "t"},
        {"type": "text", "text": 7},
        {},
        7,
        None,
        [],
    ],
)
def test_unknown_parts_become_digests(part: object) -> None:
    made = chat({"role": "user", "content": [part, {"type": "text", "text": "t"}]})
    assert made.media == 1
    assert made.pieces[0].startswith(b"\xffuser\xfe\xfc")
    assert made.pieces[0].endswith(b"\xfdt")


def test_tool_calls_are_part_of_their_turn() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert turn(role="assistant", content=None, tool_calls=[call]) == b'\xffassistant\xfe\xfbf\xfe{"a":1}'
    assert turn(role="assistant", content="x", tool_calls=[call, call]).count(b"\xfb") == 2
    assert turn(role="assistant", function_call=call["function"]) == b'\xffassistant\xfe\xfbf\xfe{"a":1}'


def test_tool_calls_of_another_shape_do_not_disturb_their_neighbours() -> None:
    plain = {"role": "user", "content": "x"}
    as_object = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    custom = {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}
    made = chat(plain, as_object, custom, plain)
    assert made.pieces[0] == made.pieces[3] == b"\xffuser\xfex"
    assert made.pieces[1] == b'\xffassistant\xfe\xfbf\xfe{"a": 1}'
    assert made.pieces[2].startswith(b"\xffassistant\xfe\xfc")


def test_reasoning_is_kept_apart_from_the_answer() -> None:
    assert turn(role="assistant", reasoning_content="hm", content="so") == b"\xffassistant\xfe\xf9hm\xfdso"
    assert turn(role="assistant", reasoning="hm", content="so") == b"\xffassistant\xfe\xf9hm\xfdso"


@pytest.mark.parametrize(
    "odd", [{"role": 5, "content": "x"}, {"role": "user", "content": 5}, "text", 7, None, []]
)
def test_an_odd_message_leaves_the_others_as_they_are(odd: object) -> None:
    made = chat({"role": "user", "content": "x"}, odd, {"role": "user", "content": "y"})
    assert (made.pieces[0], made.pieces[-1]) == (b"\xffuser\xfex", b"\xffuser\xfey")
    assert len(made.pieces) == 3


@pytest.mark.parametrize("messages", [None, "text", 5, {}, []])
def test_messages_of_another_type_are_no_prompt(messages: object) -> None:
    assert prompt(CHAT, {"messages": messages}) == Prompt()


def test_anthropic_system_as_string_or_blocks_is_a_system_turn() -> None:
    messages = [{"role": "user", "content": "x"}]
    block = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}
    as_string = prompt("/v1/messages", {"messages": messages, "system": "s"})
    assert as_string.pieces == (b"\xffsystem\xfes", b"\xffuser\xfex")
    assert prompt("/v1/messages", {"messages": messages, "system": [block]}) == as_string
    assert prompt("/v1/messages/count_tokens", {"messages": messages, "system": "s"}) == as_string


def test_anthropic_tool_use_and_results() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}
    after = {"type": "text", "text": "next"}
    body = {
        "messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result, after]}]
    }
    assert prompt("/v1/messages", body).pieces == (
        b'\xffassistant\xfe\xfbf\xfe{"a": 1}',
        b"\xffuser\xfe\xf8\xfd42\xc0\xfdnext",
    )


def test_wandering_cache_markers_change_nothing() -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    for block in (
        {"type": "text", "text": "t"},
        {"type": "tool_result", "content": "r"},
        {"type": "tool_use", "name": "f", "input": {}},
    ):
        assert turn(role="user", content=[block]) == turn(role="user", content=[block | marker])


def test_responses_input_as_string_or_items() -> None:
    as_string = prompt("/v1/responses", {"instructions": "s", "input": "x"})
    assert as_string.pieces == (b"\xffsystem\xfes", b"\xffuser\xfex")
    part = {"type": "input_text", "text": "x"}
    for item in (
        {"role": "user", "content": "x"},
        {"type": "message", "role": "user", "content": [part]},
    ):
        assert prompt("/v1/responses", {"instructions": "s", "input": [item]}) == as_string


def test_responses_items_of_every_kind() -> None:
    items = [
        {"type": "message", "role": "assistant", "content": None},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "reasoning", "encrypted_content": "xyz"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"type": "item_reference", "id": "i"},
        7,
    ]
    pieces = prompt("/v1/responses", {"input": items}).pieces
    assert pieces[0] == b"\xffassistant\xfe"
    assert pieces[1] == b"\xffreasoning\xfehm"
    assert pieces[2].startswith(b"\xffreasoning\xfe\xfc")
    assert pieces[3] == b"\xfffunction_call\xfe\xfbf\xfe{}"
    assert pieces[4] == b"\xfffunction_call_output\xfe42"
    assert pieces[5].startswith(b"\xffitem_reference\xfe\xfc")
    assert pieces[6].startswith(b"\xff\xfe\xfc")


def test_a_completions_prompt_as_text_or_texts() -> None:
    assert prompt("/v1/completions", {"prompt": "a"}).pieces == (b"\xfaprompt\xfea",)
    assert prompt("/v1/completions", {"prompt": ["a", "b"]}).pieces == (
        b"\xfaprompt\xfea",
        b"\xfaprompt\xfeb",
    )


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2], [3]], (1, 2, 3)),
        ([2**32 - 1], (2**32 - 1,)),
        ([], None),
        ([[]], None),
    ],
)
def test_a_completions_prompt_as_token_ids(value: object, ids: tuple[int, ...] | None) -> None:
    made = prompt("/v1/completions", {"prompt": value})
    assert (made.token_ids, made.pieces, made.size) == (ids, (), 4 * len(ids or ()))


@pytest.mark.parametrize("value", [[-1], [2**32], [1.5], [1, "a"], [{"prompt_token_ids": [1]}], 7, {"x": 1}])
def test_a_prompt_of_another_type_still_has_a_fingerprint(value: object) -> None:
    made = prompt("/v1/completions", {"prompt": value})
    assert made.token_ids is None
    assert made.size > 0


@pytest.mark.parametrize("body", [{}, {"prompt": None}])
def test_no_prompt(body: object) -> None:
    assert prompt("/v1/completions", body) == Prompt()


@pytest.mark.parametrize(
    ("path", "body", "pieces"),
    [
        ("/v1/embeddings", {"input": "a"}, (b"\xfainput\xfea",)),
        ("/v1/embeddings", {"input": ["a", "b"]}, (b"\xfainput\xfea", b"\xfainput\xfeb")),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, (b"\xffuser\xfea",)),
        (
            "/rerank",
            {"documents": ["d", {"text": "e"}], "query": "q"},
            (b"\xfaquery\xfeq", b"\xfadocuments\xfed", b"\xfadocuments\xfee"),
        ),
        ("/score", {"text_1": "a", "text_2": ["b"]}, (b"\xfatext_1\xfea", b"\xfatext_2\xfeb")),
        ("/tokenize", {"prompt": "a"}, (b"\xfaprompt\xfea",)),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, (b"\xffuser\xfea",)),
        ("/v1/audio/speech", {"input": "a"}, (b"\xfainput\xfea",)),
    ],
)
def test_other_apis(path: str, body: object, pieces: tuple[bytes, ...]) -> None:
    assert prompt(path, body).pieces == pieces


def test_unknown_paths_have_no_prompt() -> None:
    assert prompt("/unknown", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}) == Prompt()


def test_keys_of_another_api_are_not_read() -> None:
    assert prompt(CHAT, {"prompt": "a", "input": "b", "messages": []}) == Prompt()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}] * 20_000},
        {"messages": [5] * 20_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}]},
        {"messages": [{"role": "user", "content": ["x"] * 100}] * 300},
    ],
)
def test_a_request_of_very_many_items_is_read_in_part_and_sized_in_full(body: dict[str, Any]) -> None:
    made = prompt(CHAT, body)
    pieces = sum(map(len, made.pieces))
    assert pieces < 30 * 16_384
    assert made.size == max(pieces, len(json.dumps(body["messages"])))


def test_tool_results_do_not_nest() -> None:
    inner = {"type": "tool_result", "content": "x"}
    piece = turn(role="user", content=[{"type": "tool_result", "content": [inner]}, inner])
    assert piece[:8] == b"\xffuser\xfe\xf8\xfc"
    assert piece[24:] == b"\xc0\xf8\xfdx\xc0"


texts = st.text(max_size=8) | st.sampled_from(["user", "a", "\\xff", "\xff", "\xfe", "þ"])
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda text: {"type": "image_url", "image_url": {"url": text}}, texts),
    st.builds(lambda name, text: {"type": "tool_use", "name": name, "input": {"a": text}}, texts, texts),
    st.builds(lambda text: {"type": "tool_result", "content": text}, texts),
    st.builds(lambda text: {"type": "thinking", "thinking": text}, texts),
)
calls = st.lists(
    st.builds(lambda name, text: {"id": "c", "function": {"name": name, "arguments": text}}, texts, texts),
    max_size=2,
)
messages = st.builds(
    lambda role, content, tool_calls: (
        {"role": role, "content": content} | ({"tool_calls": tool_calls} if tool_calls else {})
    ),
    st.sampled_from(["system", "user", "assistant", "tool", "other"]) | texts,
    st.none() | texts | st.lists(parts, max_size=3),
    calls,
)
conversations = st.lists(messages, max_size=5)


def flat(path: str, key: str, turns: list[Any]) -> bytes:
    body = {"tools": [{"name": "t"}], "system": "s", "instructions": "s", key: turns}
    return b"".join(prompt(path, body).pieces)


@given(
    conversations,
    conversations,
    st.sampled_from([(CHAT, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")]),
)
def test_a_conversation_that_grew_starts_with_the_bytes_it_had(
    before: list[Any], added: list[Any], api: tuple[str, str]
) -> None:
    assert flat(*api, before + added).startswith(flat(*api, before))


@given(conversations, st.sampled_from([5, {"role": 7}, {"role": "user", "content": 4}, {"tool_calls": {}}]))
def test_growth_by_an_odd_message_keeps_the_bytes_too(before: list[Any], odd: object) -> None:
    assert flat(CHAT, "messages", [*before, odd]).startswith(flat(CHAT, "messages", before))


plain_messages = st.tuples(
    st.sampled_from(["user", "assistant", "tools"]) | texts, texts | st.lists(texts, min_size=2, max_size=3)
)


@given(st.lists(plain_messages, max_size=4), st.lists(plain_messages, max_size=4))
def test_different_conversations_never_have_the_same_bytes(first: list[Any], second: list[Any]) -> None:
    def made(turns: list[Any]) -> bytes:
        return b"".join(
            chat(
                *(
                    {
                        "role": role,
                        "content": text
                        if isinstance(text, str)
                        else [{"type": "text", "text": t} for t in text],
                    }
                    for role, text in turns
                )
            ).pieces
        )

    assert (made(first) == made(second)) == (first == second)
