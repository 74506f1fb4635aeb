"""``extproc replay``: its options. What it does is imported when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE…",
            help="Trace files (block-hash JSONL, CSV of lengths, decision log), workload files (.yaml), or built-in "
            "workloads: agents, batch, chat, lora, rag, shared-prompt.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="NAME[:key=value…]; may be repeated. None: the default and all peers."),
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="How many engines.")] = 8,
    engine_preset: Annotated[
        list[str] | None, typer.Option(help="Speed and size of the engines; several are dealt out in turn.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache of an engine in tokens, in place of the preset's.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=1, help="The same in blocks of 16 tokens.")] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=16, help="Tokens in a simulated block; default: 64 to 512 by the prompts' length."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many arrivals.")] = None,
    rate_scale: Annotated[float, typer.Option(min=1e-6, max=1e6, help="2 replays twice as fast.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests/s of generated workloads; default: 1 per engine.")
    ] = None,
    scrape_interval: Annotated[
        float, typer.Option(min=0.01, max=3600.0, help="Seconds between scrapes.")
    ] = 1.0,
    scrape_lag: Annotated[
        float, typer.Option(min=0.0, max=3600.0, help="Age of the numbers that engines show.")
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="slow, stall, down, frozen-metrics or no-metrics, and as wanted :engine=N :factor=F :at=S :for=S behind "
            "it; may be repeated, e.g. slow:engine=3:at=60 or down:engine=0:for=9."
        ),
    ] = None,
    perturb: Annotated[
        list[str] | None,
        typer.Option(
            help="Engines unlike the model: attention, interference, blocks, jitter; may be repeated."
        ),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(
            help="Let requests wait in the gateway: shared, interactive, throughput or batch, and as wanted "
            ":max_wait_s=S :max_ttft_s=S … behind it. None: each is sent at once."
        ),
    ] = None,
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="SLO: seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(min=0.001, help="SLO: seconds per further token.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here.")] = None,
    explain: Annotated[
        str | None,
        typer.Option(help="Print every candidate's cost for this request (its number in the trace)."),
    ] = None,
) -> None:
    """Replay traffic under routing policies in virtual time, through the code that serves production."""
    from extproc.replay.command import Wishes, run_replay
    from extproc.replay.errors import ReplayError

    wishes = Wishes(
        traces,
        policies=policy or [],
        engines=engines,
        presets=engine_preset or ["llama-8b-h100"],
        kv_tokens=kv_tokens if kv_tokens is not None else kv_blocks * 16 if kv_blocks is not None else None,
        block_size=block_size,
        requests=requests,
        rate_scale=rate_scale,
        rate=rate,
        scrape_interval_s=scrape_interval,
        scrape_lag_s=scrape_lag,
        faults=fault or [],
        perturb=perturb or [],
        admission=admission,
        slo_ttft_s=slo_ttft,
        slo_tpot_s=slo_tpot,
        seed=seed,
        json=json,
        html=html,
        explain=explain,
    )
    try:
        run_replay(wishes)
    except (ReplayError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
