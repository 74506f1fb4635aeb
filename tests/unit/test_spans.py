"""Spans of requests: when a request is traced, what its spans say, and what they never say."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import extproc.telemetry.spans as module
from extproc.core import Core
from extproc.outcome import End, Usage
from extproc.routing.rejection import Rejection
from extproc.routing.tenant import Tenant
from extproc.telemetry.spans import (
    Kind,
    Span,
    Traces,
    read_traceparent,
    write_traceparent,
)
from tests.unit import core_parts

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENDPOINT = core_parts.spec("a")


class Lab:
    """A core whose requests are traced, with a clock that tests move."""

    def __init__(self, ratio: float = 1.0, **options: object) -> None:
        self.now = 100.0
        self.ended: list[tuple[Span, ...]] = []
        self.traces = Traces(ratio, random.Random(1), lambda: self.now, self.ended.append, **options)  # type: ignore[arg-type]
        self.core: Core = core_parts.core(
            [ENDPOINT], on_considered=self.traces.considered, on_settled=self.traces.settled
        )
        self.core.admission.on_stage = self.traces.passed

    def submit(
        self, request_id: str = "r", text: str = "hello", headers: dict[str, str] | None = None
    ) -> None:
        request = core_parts.request(request_id, text, headers=headers)
        began, self.now = self.now, self.now + 0.002
        self.traces.read(request, began)
        self.core.admission.submit(request, self.now, Tenant("t"))

    def end(self, request_id: str = "r", status: int = 200, **more: object) -> None:
        said = {"waiting_s": 0.01, "ttft_s": 0.3, "engine_s": 1.5, "duration_s": 1.52, **more}
        self.now += 1.6
        self.core.take(core_parts.end(request_id, ENDPOINT, status, **said), self.now)

    @property
    def spans(self) -> dict[str, Span]:
        (spans,) = self.ended
        return {span.name: span for span in spans}


def test_the_header_of_the_standard_is_read_and_written() -> None:
    parent = read_traceparent(CLIENT)
    assert parent is not None
    assert parent.sampled
    assert write_traceparent(parent.trace_id, parent.span_id) == CLIENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        CLIENT.upper(),
        CLIENT + "-more",
        "ff" + CLIENT[2:],
        CLIENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        CLIENT.replace("00f067aa0ba902b7", "0" * 16),
        CLIENT[:-1],
    ],
)
def test_a_header_that_the_standard_forbids_is_ignored(text: str) -> None:
    assert read_traceparent(text) is None


def test_a_later_version_may_say_more() -> None:
    assert read_traceparent("01" + CLIENT[2:] + "-more") is not None


@given(st.text(max_size=80))
def test_no_header_breaks_the_reader(text: str) -> None:
    read_traceparent(text)


def test_a_request_has_a_span_for_every_stage_under_one_root() -> None:
    lab = Lab()
    lab.submit()
    lab.end()
    assert list(lab.spans) == ["gateway", "read", "match", "limit", "decide", "engine", "settle"]
    root = lab.spans["gateway"]
    assert root.kind is Kind.SERVER
    assert root.parent_id == 0
    assert {span.parent_id for span in lab.spans.values() if span is not root} == {root.span_id}
    assert {span.trace_id for span in lab.spans.values()} == {root.trace_id}
    assert len({span.span_id for span in lab.spans.values()}) == 7


def test_times_are_ours_until_the_decision_and_envoys_after_it() -> None:
    lab = Lab()
    lab.submit()
    lab.end()
    spans = lab.spans
    assert (spans["read"].start_s, spans["read"].end_s) == (100.0, 100.002)
    assert spans["engine"].start_s == pytest.approx(100.01)
    assert spans["engine"].first_token_s == pytest.approx(100.31)
    assert spans["engine"].end_s == pytest.approx(101.51)
    assert (spans["gateway"].start_s, spans["gateway"].end_s) == (100.0, pytest.approx(101.52))
    assert spans["settle"].start_s == pytest.approx(101.602)


def test_attributes_say_where_why_and_how_much() -> None:
    lab = Lab()
    lab.submit()
    lab.end(usage=Usage(500, 20, 400))
    spans = lab.spans
    assert spans["gateway"].attributes["gateway.pool"] == "llama"
    assert spans["gateway"].attributes["gateway.tenant"] == "t"
    assert spans["gateway"].attributes["http.response.status_code"] == 200
    assert spans["gateway"].attributes["gateway.outcome"] == "success"
    assert spans["decide"].attributes["gateway.strategy"] == "least-requests"
    assert spans["decide"].attributes["gateway.reason"] == "only_one"
    assert spans["engine"].attributes["gen_ai.usage.input_tokens"] == 500
    assert spans["engine"].attributes["gateway.cached_tokens"] == 400
    assert not spans["gateway"].error


def test_a_request_that_waited_has_a_span_of_the_queue() -> None:
    lab = Lab()
    lab.submit()
    request = core_parts.request("r2")
    lab.traces.read(request, lab.now)
    lab.traces.passed("r2", "match")
    lab.traces.passed("r2", "limit")
    began_waiting, lab.now = lab.now, lab.now + 2.5
    lab.core.dispatcher.decide(request, lab.now)
    lab.end("r2")
    queue = lab.spans["queue"]
    assert (queue.start_s, queue.end_s) == (began_waiting, began_waiting + 2.5)


def test_a_failure_marks_root_and_engine() -> None:
    lab = Lab()
    lab.submit()
    lab.end(status=500)
    assert lab.spans["gateway"].error == lab.spans["engine"].error == "server_error"
    assert not lab.spans["decide"].error


def test_a_request_whose_end_was_never_reported_ends_when_that_is_known() -> None:
    lab = Lab()
    lab.submit()
    lab.now += 1000.0
    lab.core.housekeep(lab.now)
    assert lab.spans["gateway"].attributes["gateway.reason"] == "dead"
    assert "engine" not in lab.spans


def test_a_refused_request_ends_in_the_stage_that_refused_it() -> None:
    lab = Lab()
    request = core_parts.request("r")
    lab.traces.read(request, lab.now)
    lab.traces.passed("r", "match")
    lab.now += 0.5
    lab.traces.refused(
        "r", Rejection(429, "rate_limit_error", "rate_limit_exceeded", "", "limit_tenant_tokens")
    )
    assert list(lab.spans) == ["gateway", "read", "match", "limit"]
    assert lab.spans["limit"].error == "limit_tenant_tokens"
    assert lab.spans["gateway"].attributes["http.response.status_code"] == 429
    assert not lab.spans["gateway"].error, "a refusal with 4xx is the client's, not ours"
    assert "gen_ai.request.model" not in lab.spans["gateway"].attributes


def test_a_client_that_leaves_the_queue_ends_its_trace() -> None:
    lab = Lab()
    lab.traces.read(core_parts.request("r"), lab.now)
    lab.now += 3.0
    lab.traces.left("r")
    assert lab.spans["queue"].end_s == 103.0
    assert lab.spans["gateway"].attributes["gateway.reason"] == "client_gone"
    assert lab.traces.running == 0


def test_the_clients_trace_goes_on_and_the_engine_hangs_below_its_span() -> None:
    lab = Lab(ratio=0.0)
    lab.submit(headers={"traceparent": CLIENT})
    (name, value), *rest = lab.traces.words("r")
    assert (name, rest) == ("traceparent", [])
    lab.end()
    client, sent = read_traceparent(CLIENT), read_traceparent(value)
    assert client is not None
    assert sent is not None
    assert lab.spans["gateway"].trace_id == client.trace_id == sent.trace_id
    assert lab.spans["gateway"].parent_id == client.span_id
    assert lab.spans["engine"].span_id == sent.span_id


@pytest.mark.parametrize("headers", [{}, {"traceparent": CLIENT[:-2] + "00"}, {"traceparent": "odd"}])
def test_a_request_that_is_not_traced_leaves_nothing_and_keeps_its_header(headers: dict[str, str]) -> None:
    lab = Lab(ratio=0.0)
    lab.submit(headers=headers)
    assert lab.traces.words("r") == ()
    assert lab.traces.running == 0
    lab.end()
    assert not lab.ended


def test_clients_may_be_kept_from_choosing() -> None:
    lab = Lab(ratio=0.0, follow_clients=False)
    lab.submit(headers={"traceparent": CLIENT})
    assert lab.traces.running == 0


def test_about_the_share_that_was_asked_for_is_traced() -> None:
    lab = Lab(ratio=0.25)
    for number in range(2000):
        lab.traces.read(core_parts.request(str(number)), lab.now)
    assert 400 < lab.traces.running < 600


def test_traces_that_never_end_are_forgotten() -> None:
    lab = Lab(most_running=10)
    for number in range(15):
        lab.traces.read(core_parts.request(str(number)), lab.now)
    assert (lab.traces.running, lab.traces.forgotten) == (10, 5)


def test_no_attribute_holds_a_prompt_a_key_or_a_path() -> None:
    lab = Lab()
    lab.submit(
        text="my secret plan", headers={"authorization": "Bearer sk-secret", "x-session-id": "secret-7"}
    )
    lab.end()
    shown = repr(lab.ended)
    assert "secret" not in shown
    assert "/v1/" not in shown


def test_spans_never_end_before_they_begin() -> None:
    lab = Lab()
    lab.submit()
    lab.end(waiting_s=0.0, ttft_s=0.0, engine_s=0.0, duration_s=0.0)
    assert all(span.end_s >= span.start_s for span in lab.spans.values())


def test_an_end_that_no_engine_took_part_in_has_no_engine_span() -> None:
    lab = Lab()
    lab.submit()
    lab.now += 0.1
    lab.core.take(End("r", "", "", 503, flags=("UF",), duration_s=0.1), lab.now)
    assert "engine" not in lab.spans
    assert lab.spans["gateway"].error == "connect_failure"


def test_the_file_has_no_clock_no_socket_and_no_opentelemetry() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [name for name in names if name and name.split(".")[0] in ("time", "asyncio", "opentelemetry")]


def test_the_documentation_lists_every_attribute() -> None:
    name = re.compile(r"[\"`]((?:gateway|gen_ai|http|server)(?:\.[a-z_]+)+)[\"`]")
    page = Path(__file__).parents[2] / "docs/tracing.md"
    assert set(name.findall(Path(module.__file__).read_text())) == set(name.findall(page.read_text()))
