"""The ``extproc`` command."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from extproc.fleet_commands import DEFAULT_ADMIN, Admin
from extproc.fleet_commands import app as fleet_app
from extproc.release_commands import app as release_app
from extproc.replay.cli import replay

app = typer.Typer(
    name="extproc",
    help="LLM inference gateway: decides beside Envoy which engine serves each request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Option("--config", "-c", help="extproc.yaml; need not exist (all defaults).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON once and exit.")]

app.add_typer(fleet_app, name="fleet")
app.add_typer(release_app, name="release")


@app.command()
def serve(config: Config = Path("extproc.yaml")) -> None:
    """Run the service that Envoy asks. Stops gracefully on SIGTERM."""
    from extproc.config.problem import ConfigError
    from extproc.gateway import run

    try:
        asyncio.run(run(config))
    except ConfigError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"extproc cannot listen: {error}")


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="Port of the gateway on 127.0.0.1.")] = 8080,
    admin_port: Annotated[int, typer.Option(help="Port of admin and /metrics on 127.0.0.1.")] = 9902,
    engine: Annotated[
        list[str] | None, typer.Option(help="Your own engine, http://HOST:PORT; may be repeated.")
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=16, help="How many simulated engines; default: 3.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model of the simulated engines; with --engine: which of its models."),
    ] = None,
) -> None:
    """Envoy, extproc and simulated engines on this machine, from one command. Ctrl-C stops all of it."""
    from extproc.demo import DemoError
    from extproc.demo import run as run_demo

    try:
        asyncio.run(run_demo(port=port, admin_port=admin_port, own=engine or (), count=engines, model=model))
    except DemoError as error:
        _fail(str(error))


@app.command()
def check(
    config: Config = Path("extproc.yaml"),
    envoy: Annotated[
        Path | None, typer.Option(help="Envoy's bootstrap; default: envoy/envoy.yaml beside the config.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the values that hold.")] = False,
) -> None:
    """Look through extproc.yaml, clusters.yaml and Envoy's configuration; exit code 1 if anything cannot work."""
    from extproc.config.check import check as look

    beside = config.parent / "envoy" / "envoy.yaml"
    bootstrap = envoy or (beside if beside.exists() else None)
    problems = look(config, bootstrap, envoy_binary=envoy_binary())
    for problem in problems:
        typer.echo(str(problem))
    if bootstrap is None:
        typer.echo(f"warning: {beside} not found, not checked; name it with --envoy")
    fatal = sum(problem.fatal for problem in problems)
    if fatal:
        _fail(f"{fatal} thing{'s' if fatal > 1 else ''} to mend")
    if explain:
        from extproc.config.explain import explain as values
        from extproc.config.load import load

        for line in values(load(config)):
            typer.echo(line)
    typer.echo("ok")


@app.command()
def explain(
    id: Annotated[str, typer.Argument(help="x-gateway-request-id of the request.")],
    admin: Admin = DEFAULT_ADMIN,
    json: AsJson = False,
) -> None:
    """Why a request went where it went: every candidate with every term of its cost."""
    from extproc.fleet_view import AdminError, run_explain

    try:
        run_explain(admin, id, json_output=json)
    except AdminError as error:
        _fail(str(error))


app.command()(replay)


def envoy_binary() -> str | None:
    """Path of an Envoy binary: the one installed beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "envoy"
    return str(beside) if beside.exists() else shutil.which("envoy")


def main() -> None:
    """Entry point."""
    app()


def _fail(message: str) -> None:
    typer.echo(message, err=True)
    raise typer.Exit(1)
