"""``extproc fleet``: the live view, and what operators do to the fleet of a running extproc."""

from __future__ import annotations

import json as json_module
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

DEFAULT_ADMIN = "http://127.0.0.1:9902"
ADMIN_VARIABLE = "EXTPROC_ADMIN"
TOKEN_VARIABLE = "EXTPROC_ADMIN_TOKEN"

app = typer.Typer(
    help="Live view of the endpoints; drain, undrain, register and remove them.", add_completion=False
)

Admin = Annotated[
    str,
    typer.Option(
        "--admin", envvar=ADMIN_VARIABLE, metavar="HOST:PORT", help="Admin address of a running extproc."
    ),
]
AdminHere = Annotated[
    str,
    # Not from the environment: that would win over the option given before the command.
    typer.Option(
        "--admin",
        metavar="HOST:PORT",
        show_default=False,
        help=f"Admin address of a running extproc; default: {ADMIN_VARIABLE}, else {DEFAULT_ADMIN}.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON once and exit.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help=f"File with the admin token; default: the environment variable {TOKEN_VARIABLE}."),
]
Name = Annotated[
    str, typer.Argument(help="A cluster, HOST:PORT, or CLUSTER/HOST:PORT, as `extproc fleet` shows it.")
]


@app.callback(invoke_without_command=True)
def fleet(context: typer.Context, admin: Admin = DEFAULT_ADMIN, json: AsJson = False) -> None:
    """Live view of the endpoints: state, leases, backlog, KV use, hit share, TTFT, rate."""
    context.obj = admin
    if context.invoked_subcommand is not None:
        return
    from extproc.fleet_view import AdminError, run_fleet

    try:
        run_fleet(admin, json_output=json, once=not sys.stdout.isatty())
    except AdminError as error:
        _fail(str(error))


@app.command()
def queue(
    context: typer.Context,
    admin: AdminHere = "",
    json: AsJson = False,
) -> None:
    """Live view of the requests that wait: pool, priority, tenant."""
    from extproc.fleet_view import AdminError
    from extproc.queue_view import run_queue

    try:
        run_queue(admin or context.obj, json_output=json, once=not sys.stdout.isatty())
    except AdminError as error:
        _fail(str(error))


@app.command()
def drain(
    context: typer.Context,
    endpoint: Name,
    deadline: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for running requests; 0 does not wait.")
    ] = 600.0,
    admin: AdminHere = "",
    token_file: TokenFile = None,
) -> None:
    """No new requests; wait until what runs there has ended. Exit code 2 when the deadline passed first."""
    asked = {"endpoint": endpoint, "wait_s": deadline}
    done = _post(context, admin, token_file, "/fleet/drain", asked, deadline + 10)
    _print(done["endpoints"])
    if not done["idle"]:
        typer.echo("requests still run there", err=True)
        raise typer.Exit(2)


@app.command()
def undrain(
    context: typer.Context, endpoint: Name, admin: AdminHere = "", token_file: TokenFile = None
) -> None:
    """Give a drained endpoint requests again, once it is ready."""
    _print(_post(context, admin, token_file, "/fleet/undrain", {"endpoint": endpoint})["endpoints"])


@app.command()
def register(
    context: typer.Context,
    address: Annotated[str, typer.Argument(help="HOST:PORT of the engine.")],
    pool: Annotated[str, typer.Option(help="Pool it belongs to.")],
    model: Annotated[list[str] | None, typer.Option(help="Model it serves; may be repeated.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm, sglang, …")] = None,
    version: Annotated[str | None, typer.Option(help="Arm of a release.")] = None,
    weight: Annotated[float | None, typer.Option(help="Share in weighted strategies.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests at once.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of its Envoy cluster.")] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any other key of the metadata, value as JSON."),
    ] = None,
    admin: AdminHere = "",
    token_file: TokenFile = None,
) -> None:
    """Add an endpoint while everything serves. It is published to Envoy and survives restarts."""
    asked: dict[str, Any] = {"address": address, "pool": pool}
    said = {
        "model": model or None,
        "engine": engine,
        "version": version,
        "weight": weight,
        "max_concurrency": max_concurrency,
        "name": name,
    }
    asked.update({key: value for key, value in said.items() if value is not None})
    for pair in set or ():
        key, _, value = pair.partition("=")
        try:
            asked[key] = json_module.loads(value)
        except ValueError:
            asked[key] = value
    _print(_post(context, admin, token_file, "/fleet/register", asked)["endpoints"])


@app.command()
def remove(
    context: typer.Context, endpoint: Name, admin: AdminHere = "", token_file: TokenFile = None
) -> None:
    """Forget a registered endpoint; its running requests end or meet the deadline."""
    _print(_post(context, admin, token_file, "/fleet/remove", {"endpoint": endpoint})["endpoints"])


def _post(
    context: typer.Context,
    admin: str,
    token_file: Path | None,
    path: str,
    asked: dict[str, Any],
    timeout_s: float = 30.0,
) -> Any:
    from extproc.fleet_view import AdminError, send

    try:
        token = token_file.read_text().strip() if token_file is not None else os.environ.get(TOKEN_VARIABLE)
        return send(admin or context.obj, path, asked, token, timeout_s)
    except (AdminError, OSError) as error:
        _fail(str(error))


def _print(endpoints: list[dict[str, Any]]) -> None:
    for row in endpoints:
        typer.echo(f"{row['endpoint']}  {row['pool']}  {row['lifecycle']}  {row['leases']} requests")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
