"""The decision log on disk: whole lines, bounded files, a full queue never waits."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from extproc.edge import decision_log
from extproc.edge.decision_log import DecisionLog
from extproc.routing.rejection import model_not_found
from extproc.telemetry.decision import DecisionRecord


def record(number: int) -> DecisionRecord:
    return DecisionRecord(f"r{number}", 0.0, rejection=model_not_found("x", []))


def ids(path: Path) -> list[str]:
    return [json.loads(text)["id"] for text in path.read_text().splitlines()]


def test_one_json_object_a_line(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "deep" / "d.jsonl")
    for number in range(3):
        log.write(record(number))
    log.close()
    assert ids(tmp_path / "deep" / "d.jsonl") == ["r0", "r1", "r2"]


def test_goes_on_where_an_earlier_process_stopped(tmp_path: Path) -> None:
    for number in range(2):
        log = DecisionLog(tmp_path / "d.jsonl")
        log.write(record(number))
        log.close()
    assert ids(tmp_path / "d.jsonl") == ["r0", "r1"]


def test_rotates_by_size_and_keeps_so_many_files(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    log = DecisionLog(path, max_bytes=2000, files=3)
    for number in range(40):
        log.write(record(number))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    assert all(file.stat().st_size <= 2000 for file in files)
    kept = [name for file in reversed(files) for name in ids(file)]
    assert kept == [f"r{number}" for number in range(40 - len(kept), 40)], "the newest, in order"


def test_a_single_file_starts_anew(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "d.jsonl", max_bytes=2000, files=1)
    for number in range(40):
        log.write(record(number))
    log.close()
    assert [file.name for file in tmp_path.iterdir()] == ["d.jsonl"]
    assert ids(tmp_path / "d.jsonl")[-1] == "r39"


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = decision_log.render

    def slow(found: DecisionRecord) -> dict[str, object]:
        gate.wait(10)
        return real(found)

    monkeypatch.setattr(decision_log, "render", slow)
    log = DecisionLog(tmp_path / "d.jsonl", queued=2)
    for number in range(10):
        log.write(record(number))
    gate.set()
    log.close()
    assert log.dropped + log.written == 10
    assert log.dropped >= 7


def test_a_disk_that_fails_loses_records_not_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = DecisionLog(tmp_path / "file" / "d.jsonl")
    log.write(record(1))
    log.close()
    assert log.dropped == 1
