"""``extproc release``: releases and shadow traffic of a running extproc, and what operators do to them."""

from __future__ import annotations

import json as json_module
import os
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from extproc.fleet_commands import DEFAULT_ADMIN, TOKEN_VARIABLE, Admin

app = typer.Typer(
    help="Releases: list, pause, promote, rollback; compare versions and shadow traffic.",
    no_args_is_help=True,
    add_completion=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help=f"File with the admin token; default: the environment variable {TOKEN_VARIABLE}."),
]
Pool = Annotated[str, typer.Argument(help="The pool whose release it is.")]


@app.command("list")
def list_releases(admin: Admin = DEFAULT_ADMIN, json: AsJson = False) -> None:
    """Every release: versions, state, share, how long it has been held."""
    report = _get(admin, "/releases")
    _show(report, json, release_table)


@app.command()
def compare(admin: Admin = DEFAULT_ADMIN, json: AsJson = False) -> None:
    """Versions of releases as seen at the same time, and copies beside their originals."""
    report = {**_get(admin, "/releases"), **_get(admin, "/shadow")}
    _show(report, json, versions_table, shadow_table)


@app.command()
def pause(pool: Pool, admin: Admin = DEFAULT_ADMIN, token_file: TokenFile = None) -> None:
    """Keep the share; the guards go on watching."""
    _order(admin, pool, "pause", {}, token_file)


@app.command()
def promote(pool: Pool, admin: Admin = DEFAULT_ADMIN, token_file: TokenFile = None) -> None:
    """The next step now; after a pause: go on; after a rollback: begin anew."""
    _order(admin, pool, "promote", {}, token_file)


@app.command()
def rollback(
    pool: Pool,
    reason: Annotated[str, typer.Option(help="Why, for log and webhook.")] = "",
    admin: Admin = DEFAULT_ADMIN,
    token_file: TokenFile = None,
) -> None:
    """Nobody gets the candidate any more, at once."""
    _order(admin, pool, "rollback", {"reason": reason} if reason else {}, token_file)


def release_table(report: Mapping[str, Any]) -> Table:
    """One row a release."""
    table = _table(
        "pool", "versions", "state", "share", "step", "held", "samples", "why", report=report["releases"]
    )
    for row in report["releases"]:
        table.add_row(
            row["pool"],
            f"{row['baseline']} -> {row['candidate']}",
            row["state"],
            f"{row['share']:.0%}",
            f"{row['step']} of {len(row['steps'])}",
            f"{row['held_s']:.0f} of {row['hold_s']:.0f} s",
            f"{row['samples']} of {row['min_samples']}",
            row["reason"] or "-",
        )
    return table


def versions_table(report: Mapping[str, Any]) -> Table:
    """Two rows a release."""
    table = _table(
        "pool", "version", "share", "requests", "errors", "slow", "score", report=report["releases"]
    )
    for row in report["releases"]:
        seen = row["seen"]
        for arm, share in (("baseline", 1.0 - row["share"]), ("candidate", row["share"])):
            score = seen["score"][arm]
            table.add_row(
                row["pool"],
                row[arm],
                f"{share:.0%}",
                str(seen["requests"][arm]),
                f"{seen['error_rate'][arm]:.2%}",
                f"{seen['slow_share'][arm]:.2%}",
                "-" if score is None else f"{score:.4g}",
            )
    return table


def shadow_table(report: Mapping[str, Any]) -> Table:
    """Two rows a shadow, and the median ratio of pairs."""
    columns = ("pool", "pairs", "errors", "TTFT p50", "p99", "duration p50", "p99", "tokens p50")
    table = _table(*columns, report=report["shadow"])
    for row in report["shadow"]:
        for name, side in ((row["pool"], "original"), (f"{row['target']} (copy)", "copy")):
            numbers = row[side]
            table.add_row(
                name,
                str(row["compared"]),
                str(numbers["errors"]),
                *_quantiles(numbers["ttft_s"], 3),
                *_quantiles(numbers["duration_s"], 3),
                _quantiles(numbers["output_tokens"], 0)[0],
            )
        ratio = row["ratio"]
        table.add_row(
            "copy / original",
            *("", ""),
            *(_ratio(ratio["ttft"]), "", _ratio(ratio["duration"]), "", _ratio(ratio["output_tokens"])),
        )
    return table


def _table(*columns: str, report: list[Any]) -> Table:
    table = Table(caption=None if report else "none configured")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _quantiles(said: Mapping[str, float] | None, digits: int) -> tuple[str, str]:
    return ("-", "-") if said is None else (f"{said['p50']:.{digits}f}", f"{said['p99']:.{digits}f}")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"x{value:.2f}"


def _show(report: Mapping[str, Any], json: bool, *tables: Callable[[Mapping[str, Any]], Table]) -> None:
    if json:
        typer.echo(json_module.dumps(report))
        return
    screen = Console() if sys.stdout.isatty() else Console(width=200)
    for table in tables:
        screen.print(table(report))


def _get(admin: str, path: str) -> dict[str, Any]:
    from extproc.fleet_view import AdminError, fetch

    try:
        return dict(fetch(admin, path))
    except AdminError as error:
        _fail(str(error))


def _order(admin: str, pool: str, word: str, body: Mapping[str, str], token_file: Path | None) -> None:
    from extproc.fleet_view import AdminError, send

    try:
        token = token_file.read_text().strip() if token_file is not None else os.environ.get(TOKEN_VARIABLE)
        event = send(admin, f"/releases/{urllib.parse.quote(pool, safe='')}/{word}", body, token)
    except (AdminError, OSError) as error:
        _fail(str(error))
    typer.echo(
        f"{event['pool']}: {event['kind']}, {event['candidate']} has {event['share']:.0%} of the clients"
    )


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
