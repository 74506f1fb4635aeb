"""How the commands find the admin address of a running extproc."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from extproc.cli import app
from extproc.fleet_view import AdminError, admin_base

REPORTS = {
    "/fleet": {"endpoints": []},
    "/queue": {"waiting": 0, "pools": []},
    "/releases": {"releases": []},
}
COMMANDS = (("fleet",), ("fleet", "queue"), ("release", "list"))


class Admin(BaseHTTPRequestHandler):
    """Answers like an extproc without endpoints."""

    def do_GET(self) -> None:
        known = self.path in REPORTS
        self.send_response(200 if known else 404)
        self.end_headers()
        wrong = {"error": {"message": f"no decision {self.path.rpartition('/')[2]}"}}
        self.wfile.write(json.dumps(REPORTS.get(self.path, wrong)).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[str]:
    """HOST:PORT of a stand-in."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("127.0.0.1:9902", "http://127.0.0.1:9902"),
        ("localhost:9902/", "http://localhost:9902"),
        ("[::1]:9902", "http://[::1]:9902"),
        ("http://10.0.0.7:9902/", "http://10.0.0.7:9902"),
        ("https://gateway.example/admin/", "https://gateway.example/admin"),
    ],
)
def test_a_scheme_may_be_left_out(said: str, meant: str) -> None:
    assert admin_base(said) == meant


@pytest.mark.parametrize("said", ["ftp://host:1", "http://", "host:port", ":9902", "[::1"])
def test_what_cannot_be_an_address_is_said_so(said: str) -> None:
    with pytest.raises(AdminError, match="write HOST:PORT or http://HOST:PORT"):
        admin_base(said)


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_every_command_takes_it_as_an_option(admin: str, words: tuple[str, ...], scheme: str) -> None:
    done = CliRunner().invoke(app, [*words, "--json", "--admin", scheme + admin])
    assert done.exit_code == 0, done.output
    assert done.exception is None


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_takes_it_from_the_environment(admin: str, words: tuple[str, ...]) -> None:
    done = CliRunner(env={"EXTPROC_ADMIN": admin}).invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output


def test_explain_takes_it_from_the_environment(admin: str) -> None:
    done = CliRunner(env={"EXTPROC_ADMIN": admin}).invoke(app, ["explain", "6f1c"])
    assert (done.exit_code, done.stderr) == (1, "no decision 6f1c\n")


@pytest.mark.parametrize("before", [True, False])
def test_the_option_wins_over_the_environment_wherever_it_stands(admin: str, before: bool) -> None:
    option = ["--admin", admin]
    words = ["fleet", *option, "queue"] if before else ["fleet", "queue", *option]
    done = CliRunner(env={"EXTPROC_ADMIN": "127.0.0.1:1"}).invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output


def test_nobody_there_is_one_line() -> None:
    done = CliRunner().invoke(app, ["fleet", "--admin", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr == "no answer from http://127.0.0.1:1/fleet: Connection refused\n"
