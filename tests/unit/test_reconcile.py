"""Leases whose endings were lost with the log are closed by what the engines say."""

from __future__ import annotations

from extproc.admission.dispatcher import Decision
from extproc.core import Core
from extproc.engines.state import EngineState
from extproc.ledger import Lease
from extproc.outcome import Renewal
from extproc.reconcile import Reconciler
from tests.unit.core_parts import core, request, spec

A = spec("a")


def opened(built: Core, request_id: str, now: float) -> Lease:
    decided = built.dispatcher.decide(request(request_id), now)
    assert isinstance(decided, Decision)
    return decided.lease


def scraped(built: Core, at: float, running: float | None, waiting: float | None = 0.0) -> None:
    endpoint = built.fleet.endpoints[A.key]
    built.fleet.scraped(endpoint, EngineState(at=at, running=running, waiting=waiting), at)


def deaf_with(built: Core, count: int) -> Reconciler:
    for number in range(count):
        opened(built, f"r{number}", 0.0)
    reconciler = Reconciler(built.ledger)
    reconciler.listened(5.0, deaf=True)
    return reconciler


def test_what_the_engine_no_longer_runs_is_closed_the_oldest_first() -> None:
    built = core([A])
    reconciler = deaf_with(built, 5)
    scraped(built, 8.0, running=2.0)
    assert reconciler.work(8.1) == 3
    assert list(built.ledger.leases) == ["r3", "r4"]
    assert built.fleet.endpoints[A.key].leases == 2


def test_nothing_is_closed_while_the_log_is_whole() -> None:
    built = core([A])
    for number in range(5):
        opened(built, f"r{number}", 0.0)
    scraped(built, 8.0, running=0.0)
    assert Reconciler(built.ledger).work(8.1) == 0


def test_a_scrape_from_before_or_just_after_the_break_proves_nothing() -> None:
    built = core([A])
    reconciler = deaf_with(built, 5)
    scraped(built, 6.0, running=0.0)
    assert reconciler.work(8.0) == 0


def test_an_old_scrape_or_a_silent_engine_proves_nothing() -> None:
    built = core([A])
    reconciler = deaf_with(built, 5)
    assert reconciler.work(8.0) == 0
    scraped(built, 8.0, running=None)
    assert reconciler.work(8.1) == 0
    scraped(built, 9.0, running=0.0)
    assert reconciler.work(60.0) == 0


def test_leases_of_after_the_break_are_no_suspects() -> None:
    built = core([A])
    reconciler = deaf_with(built, 2)
    opened(built, "new", 6.0)
    scraped(built, 9.0, running=0.0)
    assert reconciler.work(9.1) == 2
    assert list(built.ledger.leases) == ["new"]


def test_a_renewed_lease_is_no_suspect() -> None:
    built = core([A])
    reconciler = deaf_with(built, 2)
    built.ledger.renewed(Renewal("r0", "a", A.address, 0.1), 6.0)
    scraped(built, 9.0, running=1.0)
    assert reconciler.work(9.1) == 1
    assert list(built.ledger.leases) == ["r0"]


def test_what_was_opened_until_the_break_was_seen_to_be_over_is_suspect_too() -> None:
    built = core([A])
    reconciler = deaf_with(built, 1)
    opened(built, "between", 5.5)
    reconciler.listened(6.0, deaf=False)
    reconciler.listened(7.0, deaf=False)
    scraped(built, 9.0, running=0.0)
    assert reconciler.work(9.1) == 2
