"""Where an engine's ranks publish, by its own word and by what the metadata declares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.edge.kv_events import Place, places_told
from extproc.fleet.endpoint import Endpoint, EndpointSpec


def endpoint(events: int = 5557, replay: int | None = None) -> Endpoint:
    spec = EndpointSpec("c", "10.0.0.1:8000", "pool", kv_events_port=events, kv_replay_port=replay)
    return Endpoint(spec, 0)


def source(rank: int, port: int, replay: int | None = None, **more: Any) -> dict[str, Any]:
    return {
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": None if replay is None else f"tcp://*:{replay}",
        "topic": "kv",
        **more,
    }


def told(of: Endpoint, said: Any) -> dict[int, Place]:
    return places_told(of, json.dumps(said).encode())


def test_ranks_are_on_the_endpoints_host_at_ports_of_their_own() -> None:
    said = {str(rank): source(rank, 5557 + rank, 6557 + rank) for rank in range(2)}
    assert told(endpoint(), said) == {
        0: Place("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557"),
        1: Place("tcp://10.0.0.1:5558", "tcp://10.0.0.1:6558"),
    }


def test_a_list_is_understood_as_well() -> None:
    said = [source(0, 5557, data_parallel_rank=0), source(1, 5558, data_parallel_rank=1)]
    assert told(endpoint(), said)[1] == Place("tcp://10.0.0.1:5558")


def test_declared_ports_go_before_what_the_engine_calls_them_inside_its_container() -> None:
    said = {str(rank): source(rank, 5557 + rank, 6557 + rank) for rank in range(2)}
    assert told(endpoint(30_000, 31_000), said) == {
        0: Place("tcp://10.0.0.1:30000", "tcp://10.0.0.1:31000"),
        1: Place("tcp://10.0.0.1:30001", "tcp://10.0.0.1:31001"),
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"text",
        b'{"0": {"endpoint": null}}',
        b'{"0": {"endpoint": "ipc:///tmp/x"}}',
        b"[3]",
    ],
)
def test_what_makes_no_sense_is_no_place(body: bytes) -> None:
    assert places_told(endpoint(), body) == {}
