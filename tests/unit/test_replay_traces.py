"""Reading traces: what kind a file is, what becomes of its lines, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.replay.comparison import load_trace
from extproc.replay.errors import ReplayError
from extproc.replay.faults import parse_fault
from extproc.replay.prompts import job_of, request_of
from extproc.replay.traces import read_trace
from extproc.replay.workload import load_workload
from extproc.telemetry.decision import MAX_BLOCKS, mark_depths


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def hashes(tmp_path: Path, *rows: dict[str, object]) -> Path:
    return written(tmp_path, "trace.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def row(at: int, tokens: int, output: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at, "input_length": tokens, "output_length": output, "hash_ids": ids}


def test_a_block_hash_trace(tmp_path: Path) -> None:
    path = hashes(tmp_path, row(5000, 700, 20, [1, 2]), row(6500, 1000, 30, [1, 3]))
    first, second = read_trace(path)
    assert (first.at, first.prompt_tokens, first.output_tokens, list(first.blocks)) == (0.0, 700, 20, [1, 2])
    assert second.at == pytest.approx(1.5)
    assert first.block_tokens == 512


def test_the_rate_scale_divides_times(tmp_path: Path) -> None:
    path = hashes(tmp_path, row(0, 10, 1, [1]), row(4000, 10, 1, [1]))
    assert [arrival.at for arrival in read_trace(path, rate_scale=2.0)] == [0.0, 2.0]


def test_missing_ids_are_content_of_its_own(tmp_path: Path) -> None:
    path = hashes(tmp_path, row(0, 1500, 1, [7]), row(1, 1500, 1, [7]))
    first, second = read_trace(path)
    assert len(first.blocks) == len(second.blocks) == 3
    assert not set(first.blocks[1:]) & set(second.blocks[1:])


def test_a_csv_of_lengths_with_seven_digits_of_a_second(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,600,109\n"
    )
    first, second = read_trace(written(tmp_path, "lengths.csv", text))
    assert (first.prompt_tokens, first.output_tokens) == (374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert not set(first.blocks) & set(second.blocks)


def test_a_decision_log_in_order_of_ends_is_replayed_in_order_of_arrival(tmp_path: Path) -> None:
    def record(id: str, at: float, blocks: list[str]) -> str:
        outcome = {"output_tokens": 9}
        return json.dumps(
            {"id": id, "at": at, "prompt_tokens": 130, "blocks": blocks, "stream": False, "outcome": outcome}
        )

    late, early = record("b", 101.0, ["0a", "0b"]), record("a", 100.0, ["0a", "0c"])
    first, second = read_trace(written(tmp_path, "decisions.jsonl", f"{late}\n{early}\n"))
    assert (first.id, second.id, second.at, first.stream) == ("a", "b", 1.0, False)
    assert first.blocks[0] == second.blocks[0]
    assert len(first.blocks) == 3


def logged(id: str, chain: list[int], tokens: int, size: int, **more: object) -> str:
    """A line of the decision log for a prompt with these block hashes."""
    marks = [{"depth": at, "hash": f"{chain[at - 1]:016x}"} for at in mark_depths(len(chain))]
    blocks = [f"{name:016x}" for name in chain[:MAX_BLOCKS]]
    row = {
        "id": id,
        "at": 1.0,
        "prompt_tokens": tokens,
        "prompt_bytes": size,
        "blocks": blocks,
        "marks": marks,
    }
    return json.dumps(row | more) + "\n"


@pytest.mark.parametrize("shared", [20, 100, 400, 1500])
def test_what_long_prompts_of_a_decision_log_share_is_known_to_a_quarter(tmp_path: Path, shared: int) -> None:
    one = list(range(1 << 40, (1 << 40) + 2000))
    other = [*one[:shared], *range(1 << 41, (1 << 41) + 2000 - shared)]
    text = logged("a", one, 128_000, 512_000) + logged("b", other, 128_000, 512_000)
    first, second = read_trace(written(tmp_path, "decisions.jsonl", text))
    same = next(at for at, (a, b) in enumerate(zip(first.blocks, second.blocks, strict=True)) if a != b)
    assert shared * 0.75 <= same <= shared
    assert len(set(first.blocks)) == len(first.blocks) == 2000


def test_a_decision_log_tells_adapter_counted_tokens_and_the_size_of_a_block(tmp_path: Path) -> None:
    text = logged("a", [1, 2, 3], 120, 768, adapter="sql", outcome={"input_tokens": 96, "output_tokens": 7})
    (row,) = read_trace(written(tmp_path, "decisions.jsonl", text))
    assert (row.adapter, row.prompt_tokens, row.output_tokens, row.block_tokens) == ("sql", 96, 7, 32)
    assert list(row.blocks) == [1, 2, 3]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"marks": [{"depth": 10**9, "hash": "0a"}]}, "depth 1000000000"),
        ({"marks": [{"depth": 0, "hash": "0a"}]}, "depth 0"),
        ({"marks": [{"depth": 40, "hash": "xyz"}]}, "xyz"),
        ({"prompt_tokens": 10**12}, "longer than any engine"),
        ({"prompt_tokens": "many"}, "prompt_tokens"),
    ],
)
def test_a_broken_line_of_a_decision_log_is_said(
    tmp_path: Path, broken: dict[str, object], said: str
) -> None:
    with pytest.raises(ReplayError, match=rf"decisions.jsonl:1: .*{said}"):
        read_trace(written(tmp_path, "decisions.jsonl", logged("a", [1, 2], 100, 400, **broken)))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.jsonl",
            '{"timestamp": 1, "hash_ids": [], "input_length": "x", "output_length": 1}\n',
            "a.jsonl:1",
        ),
        ("b.jsonl", '{"something": 1}\n', "b.jsonl:1"),
        ("c.csv", "when,tokens\n1,2\n", "header row"),
        ("d.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "d.csv:2"),
        ("e.jsonl", "", "no requests"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        read_trace(written(tmp_path, name, text))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_equal_blocks_are_equal_bytes_and_lengths_are_kept(tmp_path: Path) -> None:
    path = hashes(tmp_path, row(0, 700, 20, [1, 2]), row(1, 900, 20, [1, 3]))
    first, second = (b"".join(request_of(arrival).prompt.pieces) for arrival in read_trace(path))
    assert len(first) == 2800
    assert first[:2048] == second[:2048]
    assert first[2048:2056] != second[2048:2056]


@pytest.mark.parametrize("size", [16, 64, 512, 1024, 48])
def test_engine_blocks_of_any_size_share_what_the_trace_shares(tmp_path: Path, size: int) -> None:
    path = hashes(tmp_path, row(0, 4000, 20, list(range(8))), row(1, 4000, 20, [0, 1, 2, 3, 14, 15, 16, 17]))
    first, second = (job_of(arrival, size).block_hashes for arrival in read_trace(path))
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert len(first) == 4000 // size
    assert same == 2048 // size


def test_one_wrong_clock_is_said_and_does_not_take_a_year(tmp_path: Path) -> None:
    text = logged("a", [1, 2], 100, 400, at=0.0) + logged("b", [1, 2], 100, 400, at=1.7e9)
    with pytest.raises(ReplayError, match="is a clock wrong"):
        read_trace(written(tmp_path, "decisions.jsonl", text))


def test_lines_and_files_that_nest_without_end_are_said(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"deep.jsonl:1"):
        read_trace(written(tmp_path, "deep.jsonl", '{"blocks":' + "[" * 100_000 + "\n"))
    endless = written(tmp_path, "endless.yaml", "kind: mix\nparts: &a [{share: 1, kind: mix, parts: *a}]\n")
    with pytest.raises(ReplayError, match="inside of themselves"):
        load_workload(str(endless))


@pytest.mark.parametrize("words", ["slow:factor=inf", "slow:factor=1e7", "stall:for=1e9", "slow:engine=1.5"])
def test_faults_beyond_reason_are_refused(words: str) -> None:
    with pytest.raises(ReplayError):
        parse_fault(words, 8)


@pytest.mark.parametrize("rate", [1e7, float("inf"), float("nan"), 1e-6])
def test_rates_beyond_reason_are_refused(rate: float) -> None:
    with pytest.raises(ReplayError):
        load_trace("chat", rate=rate, requests=10)
