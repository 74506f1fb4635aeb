"""Decision records: what they say, what they never hold, and that the ring forgets."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from extproc.admission.dispatcher import Considered, Dispatcher
from extproc.api.request import Api, InferenceRequest, Prompt, RequestHead
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.fleet import Fleet
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.view import CacheView
from extproc.ledger import Lease, Ledger, Settlement
from extproc.outcome import End, Outcome, Usage
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.rejection import model_not_found
from extproc.scheduling.strategy import Choice
from extproc.telemetry.decision import (
    MAX_LISTED,
    DecisionRecord,
    reason_of,
    record_of,
    record_of_rejection,
    render,
)
from extproc.telemetry.explain import explain
from extproc.telemetry.ring import DecisionRing

SECRET = "the quick brown prompt"


def request(request_id: str = "r1", model: str = "m") -> InferenceRequest:
    prompt = Prompt((SECRET.encode() * 100,), size=len(SECRET) * 100)
    head = RequestHead(request_id, "POST", "/v1/chat/completions", "", {"authorization": "Bearer secret-key"})
    return InferenceRequest(head, Api.CHAT, model=model, stream=True, prompt=prompt, plain=SECRET.encode())


class Setup:
    """A dispatcher over ``count`` endpoints of one pool, its records and its settlements."""

    def __init__(self, count: int = 3, ring: int = 10) -> None:
        self.fleet = Fleet()
        self.fleet.apply([EndpointSpec(f"c{i}", f"10.0.0.{i}:8000", "p", ("m",)) for i in range(count)])
        models = ModelStats()
        view = CacheView(ApproximateIndex(), models, seed=7)
        self.ring = DecisionRing(ring)
        self.ended: list[DecisionRecord | None] = []
        self.ledger = Ledger(self.fleet, view, on_settled=self.settled)
        self.dispatcher = Dispatcher(
            self.fleet, self.ledger, view, models, random.Random(1), on_considered=self.considered
        )
        self.dispatcher.install(Router({"p": Pool("p", ("m",), strategy="least-requests", fallbacks=1)}))

    def considered(self, considered: Considered, now: float) -> None:
        self.ring.add(record_of(considered, 1.79e9, 42.0))

    def settled(self, settlement: Settlement, now: float) -> None:
        self.ended.append(self.ring.settle(settlement))

    def decide(self, request_id: str = "r1") -> DecisionRecord:
        self.dispatcher.decide(request(request_id), 1.0)
        record = self.ring.find(request_id)
        assert record is not None
        return record

    def end(self, request_id: str = "r1", address: str = "10.0.0.0:8000") -> None:
        cluster = "c" + address.split(":")[0][-1]
        usage = Usage(500, 20, 400)
        self.ledger.ended(
            End(request_id, cluster, address, 200, "via_upstream", (), 0.2, 1.5, 0.01, 1.6, 900, 1, usage),
            3.0,
        )


def test_says_where_the_request_went_and_why() -> None:
    setup = Setup()
    setup.fleet.endpoints["c0/10.0.0.0:8000"].leases = 5
    said = render(setup.decide())
    assert said["id"] == "r1"
    assert said["strategy"] == "least-requests"
    assert said["chosen"] == "c1/10.0.0.1:8000"
    assert said["fallbacks"] == ["c2/10.0.0.2:8000"]
    assert said["prompt_bytes"] == len(SECRET) * 100
    candidates = said["candidates"]
    assert isinstance(candidates, list)
    assert [row["endpoint"][:2] for row in candidates] == ["c1", "c2", "c0"]
    assert [row["leases"] for row in candidates] == [0, 0, 5], "as they were at the decision"
    assert len(candidates[0]["terms"]) == len(said["terms"])  # type: ignore[arg-type]


def test_names_who_was_removed() -> None:
    setup = Setup()
    for _ in range(3):
        setup.fleet.endpoints["c1/10.0.0.1:8000"].health.failed(0.5)
    said = render(setup.decide())
    (removed,) = said["removed"]  # type: ignore[misc]
    assert removed["endpoint"] == "c1/10.0.0.1:8000"
    assert removed["reason"]


def test_gets_its_outcome_when_the_request_ends() -> None:
    setup = Setup()
    assert render(setup.decide())["outcome"] is None
    setup.end(address="10.0.0.2:8000")
    record = setup.ring.find("r1")
    assert record is not None
    assert setup.ended == [record]
    outcome = render(record)["outcome"]
    assert isinstance(outcome, dict)
    assert outcome["endpoint"] == "c2/10.0.0.2:8000", "a fallback served it"
    assert (outcome["status"], outcome["ttft_s"], outcome["cached_tokens"]) == (200, 0.2, 400)


def test_a_refusal_before_any_endpoint_is_a_record_too() -> None:
    said = render(record_of_rejection(request(model="nope"), model_not_found("nope", ["m"]), 1.0))
    assert said["chosen"] == ""
    assert said["rejection"]["code"] == "model_not_found"  # type: ignore[index]


def test_no_endpoint_left_is_recorded_with_its_reasons() -> None:
    setup = Setup(count=0)
    said = render(setup.decide())
    assert said["rejection"]["code"] == "no_capacity"  # type: ignore[index]
    assert setup.ring.running == 0


def test_never_holds_prompt_text_or_keys() -> None:
    setup = Setup()
    record = setup.decide()
    setup.end()
    text = msgspec.json.encode(render(record)).decode()
    assert "quick brown" not in text
    assert "secret-key" not in text
    assert re.fullmatch(r"[0-9a-f]{16}", json.loads(text)["blocks"][0])


def test_a_large_fleet_is_counted_not_listed() -> None:
    said = render(Setup(count=100).decide())
    assert len(said["candidates"]) == MAX_LISTED  # type: ignore[arg-type]
    assert said["candidates_total"] == 100


def test_infinite_costs_survive_json() -> None:
    record = Setup().decide()
    record.ranked[0].cost = float("inf")
    assert json.loads(msgspec.json.encode(render(record)))["candidates"][0]["cost"] is None


@pytest.mark.parametrize(
    ("matched", "reason"),
    [((0,), "only_one"), ((0, 0), "load"), ((9, 3), "prefix"), ((3, 9), "spill"), ((9, 9), "prefix")],
)
def test_the_reason_in_one_word(matched: tuple[int, ...], reason: str) -> None:
    endpoint = Endpoint(EndpointSpec("c", "a:1", "p"), 0)
    assert reason_of([Choice(endpoint, matched_tokens=tokens) for tokens in matched]) == reason


def test_field_names_are_those_of_the_proto() -> None:
    text = (Path(__file__).parents[2] / "protos" / "decision.proto").read_text()
    messages = {
        name: re.findall(r"^  (?:repeated |optional )?\w+ (\w+) = \d+;", body, re.M)
        for name, body in re.findall(r"^message (\w+) \{(.*?)^\}", text, re.M | re.S)
    }
    setup = Setup()
    for _ in range(3):
        setup.fleet.endpoints["c1/10.0.0.1:8000"].health.failed(0.5)
    record = setup.decide()
    setup.end()
    said = render(record)
    refused = render(record_of_rejection(request(), model_not_found("x", []), 1.0))
    assert list(said) == messages["DecisionRecord"]
    assert list(said["candidates"][0]) == messages["Candidate"]  # type: ignore[index]
    assert list(said["removed"][0]) == messages["Removed"]  # type: ignore[index]
    assert list(said["outcome"]) == messages["Outcome"]  # type: ignore[call-overload]
    assert list(refused["rejection"]) == messages["Rejection"]  # type: ignore[call-overload]


def plain(request_id: str) -> DecisionRecord:
    return DecisionRecord(request_id, 0.0, rejection=model_not_found("x", []))


def test_the_ring_keeps_the_newest() -> None:
    ring = DecisionRing(3)
    for number in range(5):
        ring.add(plain(f"r{number}"))
    assert [record.id for record in ring.newest(10)] == ["r4", "r3", "r2"]
    assert ring.find("r1") is None
    assert ring.find("r2") is not None


def test_a_running_request_is_found_after_the_ring_has_moved_on() -> None:
    setup = Setup(ring=1)
    setup.decide("long")
    setup.decide("later")
    assert setup.ring.find("long") is not None
    setup.end("long")
    assert setup.ended[0] is not None
    assert setup.ring.find("long") is None


def test_a_ring_of_nothing_still_completes_records_for_the_log() -> None:
    setup = Setup(ring=0)
    setup.decide()
    setup.end()
    assert setup.ended[0] is not None
    assert setup.ring.newest(5) == []


def test_an_adopted_request_has_no_record() -> None:
    endpoint = Endpoint(EndpointSpec("c", "a:1", "p"), 0)
    assert DecisionRing(1).settle(Settlement(Lease("x", endpoint, 0.0), Outcome.SUCCESS, "ok")) is None


@given(st.integers(0, 5), st.lists(st.integers(0, 7), max_size=40))
def test_the_ring_is_bounded_and_finds_what_it_lists(capacity: int, ids: list[int]) -> None:
    ring = DecisionRing(capacity)
    for number in ids:
        ring.add(plain(str(number)))
    newest = ring.newest(100)
    assert len(newest) == min(capacity, len(ids))
    assert [record.id for record in newest] == [str(number) for number in reversed(ids)][:capacity]
    assert len(ring) == len({record.id for record in newest})
    assert all(ring.find(record.id) is not None for record in newest)


def shown(record: DecisionRecord) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(explain(json.loads(msgspec.json.encode(render(record)))))
    return capture.get()


def test_explain_shows_every_candidate_and_term() -> None:
    setup = Setup()
    for _ in range(3):
        setup.fleet.endpoints["c1/10.0.0.1:8000"].health.failed(0.5)
    record = setup.decide()
    setup.end()
    text = shown(record)
    for word in (
        "r1",
        "least-requests",
        "c0/10.0.0.0:8000",
        "c2",
        "leases per weight",
        "c1",
    ):
        assert word in text
    assert "200" in text


def test_explain_shows_a_refusal() -> None:
    text = shown(record_of_rejection(request(model="nope"), model_not_found("nope", ["m"]), 1.0))
    assert "404" in text
    assert "model_not_found" in text


def test_explain_takes_names_from_clients_as_they_are() -> None:
    record = record_of_rejection(request(model="[red]x[/]"), model_not_found("[red]x[/]", []), 1.0)
    assert "[red]x[/]" in shown(record)
