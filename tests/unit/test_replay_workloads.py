"""Generated workloads: steady by seed, with the structure their numbers promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.replay.arrival import Arrival
from extproc.replay.errors import ReplayError
from extproc.replay.workload import RUN, builtin_names, generate, load_workload


def shared(arrivals: list[Arrival]) -> float:
    """Share of prompt tokens that an endless cache would hold."""
    seen: set[int] = set()
    held = 0
    for arrival in arrivals:
        for name in arrival.blocks[: arrival.prompt_tokens // RUN]:
            if name not in seen:
                break
            held += RUN
        seen.update(arrival.blocks)
    return held / sum(arrival.prompt_tokens for arrival in arrivals)


def test_the_built_in_workloads_are_those_of_the_help_text() -> None:
    assert builtin_names() == ["agents", "batch", "chat", "lora", "rag", "shared-prompt"]


@pytest.mark.parametrize("name", ["agents", "batch", "chat", "lora", "rag", "shared-prompt"])
def test_a_workload_is_the_same_for_the_same_seed_and_another_for_another(name: str) -> None:
    workload = load_workload(name)
    assert generate(workload, 50, 5.0, 1) == generate(workload, 50, 5.0, 1)
    assert generate(workload, 50, 5.0, 1) != generate(workload, 50, 5.0, 2)


@pytest.mark.parametrize("name", ["agents", "batch", "chat", "lora", "rag", "shared-prompt"])
def test_arrivals_are_in_order_and_at_the_rate(name: str) -> None:
    arrivals = generate(load_workload(name), 1500, 10.0, 3)
    times = [arrival.at for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(150, rel=0.3)


def test_turns_of_a_conversation_bring_back_prompt_and_answer() -> None:
    arrivals = generate(load_workload("chat"), 400, 4.0, 1)
    last: dict[str, Arrival] = {}
    turns = 0
    for arrival in arrivals:
        assert arrival.session is not None
        before = last.get(arrival.session)
        if before is not None:
            turns += 1
            known = (before.prompt_tokens + before.output_tokens) // RUN
            assert list(arrival.blocks[:known]) == list(before.blocks[:known])
            assert arrival.prompt_tokens > before.prompt_tokens + before.output_tokens
        last[arrival.session] = arrival
    assert turns > 100


def test_agents_share_most_and_batch_jobs_little() -> None:
    assert shared(generate(load_workload("agents"), 600, 5.0, 1)) > 0.8
    assert shared(generate(load_workload("batch"), 600, 5.0, 1)) < 0.5


def test_adapters_are_named_and_their_prompts_are_apart() -> None:
    arrivals = generate(load_workload("lora"), 300, 5.0, 1)
    heads = {arrival.adapter: arrival.blocks[0] for arrival in arrivals}
    assert len(heads) > 5
    assert len(set(heads.values())) == len(heads)


def test_a_workload_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: sessions\nturns: 1\nfirst_tokens: 1000\nanswer_tokens: 10\nspread: 0\n")
    arrivals = generate(load_workload(str(path)), 20, 1.0, 0)
    assert {arrival.prompt_tokens for arrival in arrivals} == {1000}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: nothing\n", "kind must be one of"),
        ("kind: sessions\nturn: 3\n", "'turn' is not one of"),
        ("kind: sessions\nturns: -1\n", "turns must be a number"),
        ("kind: mix\n", "needs parts"),
        ("kind: mix\nparts: [{kind: sessions, share: 0}]\n", "share of part 1"),
        ("kind: [\n", "own.yaml"),
    ],
)
def test_wrong_numbers_are_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ReplayError, match=said):
        load_workload(str(path))
