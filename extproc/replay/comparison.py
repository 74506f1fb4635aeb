"""Traces times policies: every run of a comparison, in a fixed order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from extproc.replay.arrival import Arrival
from extproc.replay.driver import Driver
from extproc.replay.errors import ReplayError
from extproc.replay.policies import Policy
from extproc.replay.result import Run
from extproc.replay.setup import Setup
from extproc.replay.traces import read_trace
from extproc.replay.workload import builtin_names, generate, load_workload, no_such_trace

_LEAST_RATE = 0.001
_MOST_RATE = 10_000.0


@dataclass(slots=True, frozen=True)
class Trace:
    """A named sequence of arrivals."""

    name: str
    arrivals: Sequence[Arrival]


def load_trace(
    name: str, *, rate_scale: float = 1.0, rate: float = 8.0, requests: int | None = None, seed: int = 0
) -> Trace:
    """A trace file, a workload file (``.yaml``) or a built-in workload by name. A generated workload has ``rate *
    rate_scale`` requests a second, and 2,000 of them if ``requests`` does not say.

    Raises:
        ReplayError: it cannot be read or understood.
    """
    if name in builtin_names() or name.endswith((".yaml", ".yml")):
        workload = load_workload(name)
        if not _LEAST_RATE <= rate * rate_scale <= _MOST_RATE:
            raise ReplayError(
                f"{name}: from {_LEAST_RATE} to {_MOST_RATE:,.0f} requests a second can be made"
            )
        return Trace(workload.name, generate(workload, requests or 2000, rate * rate_scale, seed))
    path = Path(name)
    if not path.exists():
        raise no_such_trace(name)
    return Trace(path.name, read_trace(path, rate_scale=rate_scale, limit=requests))


def compare(
    traces: Sequence[Trace],
    policies: Sequence[Policy],
    setup_of: Callable[[Trace], Setup],
    *,
    explain: str | None = None,
    on_progress: Callable[[Trace, Policy, int], None] = lambda trace, policy, done: None,
) -> Iterator[Run]:
    """One run after another, each as soon as it is done."""
    for trace in traces:
        setup = setup_of(trace)
        for policy in policies:

            def progress(done: int, trace: Trace = trace, policy: Policy = policy) -> None:
                on_progress(trace, policy, done)

            # A run makes millions of objects and no cycles worth looking for: a tenth of its time.
            gc.collect()
            gc.disable()
            try:
                run = Driver(trace.arrivals, setup, policy, explain, progress).run()
            finally:
                gc.enable()
            yield replace(run, trace=trace.name, seed=setup.seed)
