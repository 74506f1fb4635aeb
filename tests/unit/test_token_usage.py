"""Token counts as records tell them: believed where they can be true."""

from __future__ import annotations

import math

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2 as al

from extproc.edge.access_log import read
from extproc.outcome import End, Usage


def usage_of(**counts: float) -> Usage | None:
    entry = al.HTTPAccessLogEntry()
    entry.request.request_headers["x-gateway-request-id"] = "r"
    entry.common_properties.metadata.filter_metadata["usage"].update(counts)
    event = read(entry)
    assert isinstance(event, End)
    return event.usage


def test_counts_of_an_event_stream_are_read() -> None:
    assert usage_of(input=7, output=3, cached=0) == Usage(7, 3, 0)


@pytest.mark.parametrize("lie", [-1, -500_000, 1e18, math.inf, -math.inf, math.nan])
def test_a_count_that_cannot_be_is_unknown(lie: float) -> None:
    assert usage_of(input=7, output=lie) == Usage(7, None)
