"""Child processes of a benchmark: started, waited for, and ended whatever happens.

Rules of this file:

- a child runs in its own session, so Ctrl-C reaches the benchmark first, which then ends its children;
- ending is SIGTERM, then SIGKILL after a grace time; it happens on return, on errors, and on SIGTERM;
- what a child prints goes to a file in the run's directory; its last lines are shown when it fails.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


class StartError(Exception):
    """A child ended early or did not become ready."""


class Processes:
    """The children of one run, by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], *, cwd: Path | None = None) -> int:
        """Start a child; returns its process id. Python children can import this repository."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        with self.log(name).open("wb") as log:
            child = subprocess.Popen(
                list(command),
                cwd=cwd or REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[name] = child
        return child.pid

    def log(self, name: str) -> Path:
        """Where a child's output goes."""
        return self.directory / f"{name}.log"

    def wait_for(self, name: str, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Poll until ``ready``. Raises StartError with the child's last lines when it ends first or takes
        too long."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            ended = self._children[name].poll() is not None
            if ended or time.monotonic() > deadline:
                lines = self.log(name).read_text(errors="replace").splitlines()[-15:]
                why = "ended early" if ended else f"was not ready after {timeout_s:g} s"
                raise StartError("\n".join([f"{name} {why}:", *lines]))
            time.sleep(0.05)

    def running(self, name: str) -> bool:
        """Whether that child still runs."""
        return self._children[name].poll() is None

    def stop_all(self) -> None:
        """End every child, last started first."""
        for child in reversed(self._children.values()):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5.0
        for child in reversed(self._children.values()):
            try:
                child.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()


@contextlib.contextmanager
def processes(directory: Path) -> Iterator[Processes]:
    """Children that end with the block; SIGTERM ends the block too."""
    found = Processes(directory)

    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield found
    finally:
        found.stop_all()
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A TCP port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Whether something accepts connections on that loopback port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def raise_open_files() -> int:
    """Lift the limit of open files to what the machine allows (children inherit it); returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
