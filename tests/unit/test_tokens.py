"""Prompts as the engine tokenises them: templates, memory of beginnings, threads with a deadline."""

from __future__ import annotations

import asyncio
import datetime
import json
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.api.request import Api
from extproc.config.clusters import Clusters
from extproc.config.crosscheck import crosscheck
from extproc.config.schema import Settings
from extproc.config.yaml_source import Document
from extproc.edge.tokenizer_files import ModelTokenizer, TokenizerError, load
from extproc.edge.tokenizer_pool import TokenizerPool
from extproc.kvcache.chat_text import ChatTemplate, TemplateError, Text, text_of
from extproc.kvcache.token_memo import PIECE, TokenMemo
from extproc.routing.pool import Pool

tokenizers = pytest.importorskip("tokenizers")

SIMPLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def template(source: str, **more: Any) -> ChatTemplate:
    settled = {"clock": lambda: 0.0, "today": lambda: datetime.datetime(2026, 1, 2), **more}
    return ChatTemplate(source, {"bos_token": "<s>"}, **settled)


def chat(*messages: dict[str, Any], source: str = SIMPLE, **body: Any) -> str | None:
    found = text_of(Api.CHAT, json.dumps({"messages": messages, **body}).encode(), template(source))
    return None if found is None else found.text


USER = {"role": "user", "content": "hi"}


def test_messages_are_rendered_with_a_prompt_for_the_answer() -> None:
    assert chat({"role": "system", "content": "s"}, USER) == "<system>s<user>hi<assistant>"
    assert chat(USER, add_generation_prompt=False) == "<user>hi"


def test_text_parts_are_lines_or_parts_as_the_template_wants_them() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert chat(parts) == "<user>a\nb<assistant>"
    walking = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert chat(parts, USER, source=walking) == "[a][b][hi]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages[1:] %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
        "{% set rest = messages %}{% for m in rest %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
        "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endfor %}",
    ],
)
def test_templates_that_walk_over_content_are_found_out(source: str) -> None:
    assert template(source).walks_content
    assert not template(SIMPLE).walks_content


def test_tool_calls_have_objects_for_arguments_and_tools_what_they_are_described_by() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    source = (
        "{{ tools | tojson }}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "f", "unknown": 1}}
    assert chat(USER, {"role": "assistant", "tool_calls": [call]}, source=source, tools=[tool]) == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]1'
    )


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    assert chat(USER, {"role": "developer", "content": "d"}) == "<system>d<user>hi<assistant>"
    knows = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    assert chat({"role": "developer", "content": "d"}, source=knows) == "!"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [USER], "documents": [{"text": "d"}]},
        {"messages": [USER], "chat_template": "x"},
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        {"messages": "hi"},
        {"messages": []},
        {},
    ],
)
def test_what_we_do_not_follow_has_no_text(body: dict[str, Any]) -> None:
    assert text_of(Api.CHAT, json.dumps(body).encode(), template(SIMPLE)) is None


def test_prompts_are_taken_as_they_are_and_get_special_tokens() -> None:
    assert text_of(Api.COMPLETIONS, b'{"prompt": "once"}', None) == Text("once", True)
    assert text_of(Api.COMPLETIONS, b'{"prompt": "once", "add_special_tokens": false}', None) == Text(
        "once", False
    )
    assert text_of(Api.COMPLETIONS, b'{"prompt": ["a", "b"]}', None) is None
    assert text_of(Api.RESPONSES, b'{"input": "once"}', template(SIMPLE)) is None


def test_a_template_may_refuse_and_print_the_date() -> None:
    with pytest.raises(TemplateError):
        chat(USER, source="{{ raise_exception('no') }}")
    assert chat(USER, source="{{ strftime_now('%Y-%m-%d') }}{{ bos_token }}") == "2026-01-02<s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        chat(USER, source=source)


def test_a_template_that_takes_too_long_is_stopped() -> None:
    ticks = iter(range(10**9))
    slow = (
        "{% for a in range(1000) %}{% for b in range(1000) %}{{ messages[0].role }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="too long"):
        template(slow, clock=lambda: float(next(ticks)), limit_s=1000.0).render([USER], None, {})


def test_a_template_that_is_none_is_an_error() -> None:
    with pytest.raises(TemplateError):
        template("{% for %}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level tokenizer with a template, as a model's folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog; hello world, don't!"] * 20, trainer
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("model")
    made.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}" + SIMPLE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelTokenizer:
    return load(folder, max_tokens=100_000)


def ids(packed: bytes | None) -> list[int] | None:
    return None if packed is None else array("I", packed).tolist()


def test_chats_get_special_tokens_from_their_template_and_prompts_from_the_tokenizer(
    model: ModelTokenizer,
) -> None:
    prompt = ids(model.tokens(Api.COMPLETIONS, b'{"prompt": "hello world"}'))
    assert prompt is not None
    assert prompt[0] == 0
    told = ids(model.tokens(Api.CHAT, json.dumps({"messages": [USER]}).encode()))
    assert told is not None
    assert told.count(0) == 1


_PIECES = st.sampled_from(
    [
        "the quick ",
        "hello world",
        "\n",
        "\n\n",
        "  ",
        "don't",
        "漢字",
        "é",
        "😀",
        "<|end|>",
        "<s>",
        "123 ",
        "x" * 700,
        " " * 90,
    ]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(_PIECES, min_size=1, max_size=120), min_size=1, max_size=6))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(
    model: ModelTokenizer, folder: Path, parts: list[list[str]]
) -> None:
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = ""
    for part in parts:
        text += "".join(part)
        assert model.memo.encode(text).tolist() == whole.encode(text, add_special_tokens=False).ids
    assert not model.memo.broken


def test_a_conversation_that_goes_on_is_not_tokenised_again(folder: Path) -> None:
    memo = load(folder, max_tokens=100_000).memo
    text = "hello world, the lazy dog " * 400
    memo.encode(text)
    before = memo.new_chars
    memo.encode(text + "and more")
    assert memo.new_chars - before < 2 * PIECE


def test_memory_is_bounded(folder: Path) -> None:
    memo = load(folder, max_tokens=2_000).memo
    for number in range(50):
        memo.encode(f"text {number} " * 600)
        assert memo.tokens <= 2_000


class _Words:
    """An encoder whose tokens depend on the whole text: one that must not be cut."""

    def __init__(self, text: str) -> None:
        self.ids = [len(text), *range(len(text.split()))]
        self.offsets = [(0, 0), *((at, at + 1) for at in range(len(text.split())))]
        self.word_ids: list[int | None] = list(range(len(self.ids)))


def test_a_tokenizer_that_does_not_bear_cutting_is_found_out_and_used_whole() -> None:
    memo = TokenMemo(_Words, cuts=True)
    text = "word " * 3000
    for number in range(64):
        memo.encode(text + str(number))
    assert memo.broken
    assert memo.encode(text).tolist() == _Words(text).ids
    assert memo.tokens == 0


def test_a_tokenizer_that_is_not_byte_level_is_used_whole(folder: Path, tmp_path: Path) -> None:
    source = json.loads((folder / "tokenizer.json").read_text())
    source["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "_",
        "prepend_scheme": "first",
        "split": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    memo = load(tmp_path, max_tokens=100_000).memo
    memo.encode("hello world " * 500)
    assert memo.tokens == 0


@pytest.mark.parametrize("text", [None, "{", '{"model": {}}'])
def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load(tmp_path, max_tokens=10)


class _Held:
    """Stands in for a tokenizer that takes as long as the test wants."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.calls = 0

    def tokens(self, api: Api, body: bytes) -> bytes | None:
        self.calls += 1
        self.go.wait(10)
        if body == b"refuse":
            raise TemplateError("no")
        if body == b"break":
            raise ZeroDivisionError
        return body


@pytest.fixture
def held(folder: Path) -> Iterator[tuple[TokenizerPool, _Held]]:
    pool = TokenizerPool(threads=1, deadline_s=0.05)
    stand_in = _Held()
    pool._folders = {"pool": folder}
    pool._loaded[folder] = stand_in  # type: ignore[assignment]
    yield pool, stand_in
    stand_in.go.set()
    pool.close()


async def test_tokens_that_come_in_time_are_used(held: tuple[TokenizerPool, _Held]) -> None:
    pool, stand_in = held
    stand_in.go.set()
    assert await pool.tokens("pool", Api.CHAT, b"body") == b"body"
    assert await pool.tokens("other", Api.CHAT, b"body") is None


async def test_a_request_does_not_wait_beyond_its_deadline_and_the_thread_goes_on(
    held: tuple[TokenizerPool, _Held],
) -> None:
    pool, stand_in = held
    assert await pool.tokens("pool", Api.CHAT, b"body") is None
    assert pool.results["late"] == 1
    assert stand_in.calls == 1


async def test_more_than_a_few_waiting_are_not_taken_on(held: tuple[TokenizerPool, _Held]) -> None:
    pool, _ = held
    await asyncio.gather(*(pool.tokens("pool", Api.CHAT, b"body") for _ in range(20)))
    assert pool.results == {"late": 8, "busy": 12}


async def test_what_the_template_refuses_and_what_breaks_is_counted(
    held: tuple[TokenizerPool, _Held],
) -> None:
    pool, stand_in = held
    stand_in.go.set()
    assert await pool.tokens("pool", Api.CHAT, b"refuse") is None
    assert await pool.tokens("pool", Api.CHAT, b"break") is None
    assert pool.results == {"refused": 1, "failed": 1}


async def test_a_configuration_names_folders_and_a_bad_one_leaves_its_pool_without(
    folder: Path, tmp_path: Path
) -> None:
    pool = TokenizerPool()
    pool.install({"good": folder, "bad": tmp_path})
    assert await pool.tokens("good", Api.CHAT, b"{}") is None
    await pool.loaded()
    body = json.dumps({"messages": [USER]}).encode()
    assert await pool.tokens("bad", Api.CHAT, body) is None
    pool.deadline_s = 10.0
    assert await pool.tokens("good", Api.CHAT, body) is not None
    pool.install({})
    assert not pool
    pool.close()


def test_a_tokenizer_folder_without_a_tokenizer_is_a_warning(tmp_path: Path) -> None:
    settings = Settings.model_validate({"pools": {"llama": {"tokenizer": str(tmp_path)}}})
    problems = crosscheck(
        settings, Clusters((), (), {}, ()), {"llama": Pool("llama")}, Document("extproc.yaml", {})
    )
    told = [problem for problem in problems if "tokenizer.json" in problem.message]
    assert [problem.fatal for problem in told] == [False]
    (tmp_path / "tokenizer.json").write_text("{}")
    problems = crosscheck(
        settings, Clusters((), (), {}, ()), {"llama": Pool("llama")}, Document("extproc.yaml", {})
    )
    assert not [problem for problem in problems if "tokenizer.json" in problem.message]
