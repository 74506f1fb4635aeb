"""Hangs of an engine, told from pages that were read again and again."""

from __future__ import annotations

import pytest

from loadtest.fidelity import Progress, hangs


def pages(*rows: tuple[float, int, float]) -> list[Progress]:
    return [Progress(at, bool(busy), tokens) for at, busy, tokens in rows]


def test_an_engine_that_moves_at_every_page_never_hangs() -> None:
    assert hangs(pages(*((at / 10, 1, float(at)) for at in range(50))), 0.2) == []


def test_work_without_a_token_is_a_hang_but_for_one_step() -> None:
    rows = [(0.0, 1, 1.0), (0.1, 1, 2.0), *((0.2 + at / 10, 1, 2.0) for at in range(15)), (1.7, 1, 3.0)]
    ((at, seconds),) = hangs(pages(*rows), 0.2)
    assert (at, seconds) == (pytest.approx(0.1), pytest.approx(1.6 - 0.1 - 0.2))


def test_idle_time_is_none() -> None:
    assert hangs(pages((0.0, 1, 1.0), (0.1, 0, 1.0), (5.0, 0, 1.0), (5.1, 1, 1.0), (5.2, 1, 2.0)), 0.2) == []
