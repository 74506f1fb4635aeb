"""What ``extproc replay`` does: load, run, show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from extproc.replay.comparison import Trace, compare, load_trace
from extproc.replay.errors import ReplayError
from extproc.replay.faults import parse_fault
from extproc.replay.page import write_html
from extproc.replay.policies import COMPARED, Policy, parse_policy
from extproc.replay.report import table, write_json
from extproc.replay.result import Run
from extproc.replay.setup import Setup, Slo, fleet, resolution_of
from extproc.replay.waiting import parse_admission
from extproc.telemetry.explain import explain as explain_record


@dataclass(slots=True, frozen=True)
class Wishes:
    """A comparison as a user asks for it; words are not yet looked at."""

    traces: Sequence[str]
    policies: Sequence[str] = ()
    """None: the default and all peers."""
    engines: int = 8
    presets: Sequence[str] = ("llama-8b-h100",)
    kv_tokens: int | None = None
    block_size: int | None = None
    requests: int | None = None
    rate_scale: float = 1.0
    rate: float | None = None
    """Requests a second of generated workloads; None: one per engine."""
    scrape_interval_s: float = 1.0
    scrape_lag_s: float = 0.0
    faults: Sequence[str] = ()
    perturb: Sequence[str] = ()
    admission: str | None = None
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    seed: int = 0
    json: Path | None = None
    html: Path | None = None
    explain: str | None = None


def run_replay(wishes: Wishes, console: Console | None = None) -> list[Run]:
    """Run the comparison, print its table and write what is wished for.

    Raises:
        ReplayError: a wish that makes no sense.
        OSError: a file that cannot be written.
    """
    console = console or _console()
    policies = [parse_policy(words) for words in wishes.policies or COMPARED]
    rate = wishes.rate or float(wishes.engines)
    traces = [
        load_trace(name, rate_scale=wishes.rate_scale, rate=rate, requests=wishes.requests, seed=wishes.seed)
        for name in wishes.traces
    ]
    setups = {trace.name: _setup(wishes, trace) for trace in traces}
    runs = _run(wishes, traces, policies, setups)
    for trace in traces:
        console.print(table(trace.name, [run for run in runs if run.trace == trace.name]))
    if wishes.explain is not None:
        _explain(wishes.explain, runs, console)
    if wishes.json is not None:
        write_json(runs, wishes.json)
    if wishes.html is not None:
        write_html(runs, wishes.html)
    return runs


def _console() -> Console:
    """A terminal as wide as it is; a file or pipe wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _setup(wishes: Wishes, trace: Trace) -> Setup:
    size = wishes.block_size or resolution_of(trace.arrivals)
    engines = fleet(
        wishes.engines,
        wishes.presets,
        block_size=size,
        kv_tokens=wishes.kv_tokens,
        perturb=frozenset(wishes.perturb),
    )
    return Setup(
        engines,
        scrape_interval_s=wishes.scrape_interval_s,
        scrape_lag_s=wishes.scrape_lag_s,
        faults=tuple(parse_fault(words, wishes.engines) for words in wishes.faults),
        seed=wishes.seed,
        resolution=size,
        slo=Slo(wishes.slo_ttft_s, wishes.slo_tpot_s),
        admission=parse_admission(wishes.admission) if wishes.admission is not None else None,
    )


def _run(
    wishes: Wishes, traces: Sequence[Trace], policies: Sequence[Policy], setups: dict[str, Setup]
) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs: list[Run] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = len(policies) * sum(len(trace.arrivals) for trace in traces)
        bar = progress.add_task("replay", total=total)
        before = 0

        def moved(trace: Trace, policy: Policy, done: int) -> None:
            progress.update(bar, completed=before + done, description=f"{trace.name}: {policy.name}")

        for run in compare(
            traces,
            policies,
            lambda trace: setups[trace.name],
            explain=wishes.explain,
            on_progress=moved,
        ):
            runs.append(run)
            before += len(run.served)
    return runs


def _explain(request_id: str, runs: Sequence[Run], console: Console) -> None:
    for run in runs:
        if run.explained is None:
            raise ReplayError(f"{run.trace}: there is no request {request_id}")
        console.print(f"[bold]{run.trace}, {run.policy}[/]")
        console.print(explain_record(run.explained))
