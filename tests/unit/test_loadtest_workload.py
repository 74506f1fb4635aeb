"""Workloads: the same for the same seed, and true to their traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workload import (
    BLOCK_TOKENS,
    Ask,
    WorkloadError,
    block,
    fixed,
    named,
    poisson,
    size,
    text,
    trace,
)

ROWS = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 700, "output_length": 0, "hash_ids": [0, 3]},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_equal_ids_give_equal_text_and_other_ids_other_text() -> None:
    assert block("id 7", "1") == block("id 7", "1")
    assert block("id 7", "1") != block("id 8", "1")
    assert block("id 7", "1") != block("id 7", "2")


def test_a_block_is_512_words_in_about_2_kilobytes() -> None:
    assert len(block("id 7", "1").split()) == BLOCK_TOKENS
    assert len(block("id 7", "1")) == 2048


@given(tokens=st.integers(0, 1500))
def test_a_prompt_has_as_many_words_as_tokens_and_begins_like_a_longer_one(tokens: int) -> None:
    names = ["a", "b", "c"]
    made = text(iter(names), tokens, "1")
    assert len(made.split()) == tokens
    assert text(iter(names), 1536, "1").startswith(made)


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    times = list(itertools.islice(poisson(50.0, "1"), 5000))
    assert times == list(itertools.islice(poisson(50.0, "1"), 5000))
    assert times == sorted(times)
    assert 90 < times[-1] < 110


def test_fixed_prompts_take_turns() -> None:
    asks = list(itertools.islice(fixed(4096, 16, poisson(1.0, "1"), "1", prompts=2), 4))
    assert [len(ask.prompt) for ask in asks] == [4096] * 4
    assert asks[0].prompt == asks[2].prompt != asks[1].prompt


def test_a_trace_begins_at_zero_and_shares_blocks(rows: Path) -> None:
    first, second = trace(rows, "1", scale=2.0)
    assert (first.at_s, second.at_s) == (0.0, 1.0)
    assert (first.output_tokens, second.output_tokens) == (7, 1)
    assert first.prompt[:2048] == second.prompt[:2048]
    assert first.prompt[2048:2800] != second.prompt[2048:2800]
    assert len(first.prompt.split()) == 1100


def test_a_csv_trace_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,600,109\n"
    )
    first, second = trace(path, "1")
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert (len(first.prompt.split()), second.output_tokens) == (374, 109)
    assert first.prompt[:400] != second.prompt[:400]


def test_a_broken_row_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n{}\n")
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:2"):
        list(trace(path, "1"))


def test_a_body_is_a_chat_completion() -> None:
    body = json.loads(Ask(0.0, ' say "hi"', 9).body("m", stream=True))
    assert body["messages"] == [{"role": "user", "content": ' say "hi"'}]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 9, True)
    assert body["stream_options"] == {"include_usage": True}


def test_sizes_are_read() -> None:
    assert [size(one) for one in ("4KB", "220kb", "1MB", "77", "x", "conversation.jsonl")] == [
        4096,
        225280,
        1048576,
        77,
        None,
        None,
    ]


def test_a_workload_that_is_neither_size_nor_file_is_refused() -> None:
    with pytest.raises(WorkloadError):
        named("nothing-here", rate=1.0, scale=1.0, output_tokens=1, prompts=1)
