"""How many requests a second engines can do: under least-requests, when all are there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from extproc.replay.arrival import Arrival
from extproc.replay.driver import Driver
from extproc.replay.policies import parse_policy
from extproc.replay.setup import Setup


def at_once(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, all at the beginning."""
    return [replace(arrival, at=0.0) for arrival in arrivals]


def capacity(arrivals: Sequence[Arrival], setup: Setup) -> float:
    """Requests a second, by the first nine tenths that end: the last ones do not fill the engines."""
    run = Driver(arrivals, setup, parse_policy("least-requests")).run()
    ends = sorted(row.at + row.e2e_s for row in run.served if row.ok and row.e2e_s is not None)
    most = int(len(ends) * 0.9)
    return most / ends[most - 1]
