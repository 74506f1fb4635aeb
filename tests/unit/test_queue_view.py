"""``extproc fleet queue``: the report of a running core, and the table made of it."""

from __future__ import annotations

import io

from rich.console import Console

from extproc.admission.report import queue_report
from extproc.limits.limit import Limit, LimitRules
from extproc.queue_view import queue_table
from extproc.telemetry.admission_bindings import bind_admission
from extproc.telemetry.metrics import Metrics
from tests.unit.core_parts import spec
from tests.unit.test_admission import A, B, core, submit


def text(report: dict[str, object]) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(queue_table(report))
    return console.export_text()


def test_who_waits_where_is_shown_by_priority_and_tenant() -> None:
    built = core(
        spec("e", max_concurrency=2), limits=LimitRules(tenants={"a": Limit(concurrency=1)}), fallback="small"
    )
    for n in range(3):
        submit(built, f"a{n}")
    for n in range(3):
        submit(built, f"b{n}", tenant=B, now=1.0)
    report = queue_report(built.admission, ["llama", "small"], 3.0)
    (band,) = report["pools"][0]["priorities"]
    assert (report["waiting"], band["priority"], band["requests"]) == (4, 0, 4)
    assert [(row["tenant"], row["requests"], row["oldest_s"], row["limited"]) for row in band["tenants"]] == [
        ("a", 2, 3.0, True),
        ("b", 2, 2.0, False),
    ]
    shown = text(report)
    assert "4 requests wait" in shown
    assert "at its concurrency limit" in shown
    assert "falls back to small" in shown


def test_an_empty_fleet_is_a_table_too() -> None:
    assert "0 requests wait" in text(queue_report(core(spec("e")).admission, [], 0.0))


def test_without_anything_to_note_there_is_no_column_for_it() -> None:
    quiet = core(spec("e", max_concurrency=1))
    for n in range(2):
        submit(quiet, f"a{n}")
    shown = text(queue_report(quiet.admission, ["llama"], 3.0))
    assert shown.splitlines()[0].split() == [
        "pool",
        "priority",
        "tenant",
        "waiting",
        "oldest",
        "s",
        "tokens/s",
    ]
    assert "1 request waits" in shown


def test_metrics_count_waiting_by_tenant_and_never_by_address() -> None:
    built = core(limits=LimitRules(client=Limit(concurrency=50)))
    metrics = Metrics(built.fleet.endpoints, lambda: 0.0, process=False)
    bind_admission(metrics, built.admission, lambda: 0.0)
    for n in range(3):
        submit(built, f"r{n}", tenant=A, client=f"192.0.2.{n}")
    page = metrics.page().decode()
    assert 'extproc_queue_requests{pool="llama",priority="0"} 2.0' in page
    assert 'extproc_queue_tenant_requests{pool="llama",tenant="a"} 2.0' in page
    assert "192.0.2" not in page
