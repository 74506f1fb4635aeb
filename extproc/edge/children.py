"""Child processes that never outlive us: for the demo, and for whoever needs a real Envoy beside extproc."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""prctl(2): the child gets this signal when its parent dies, even by kill -9. Linux only."""


class ChildFailed(Exception):
    """A child ended or kept silent when it should have become ready; carries the tail of its log."""


class Child:
    """One process with its output in a log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path, cwd: Path | None = None) -> Child:
        """Start in a process group of its own, so that a Ctrl-C in the terminal reaches us alone."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                preexec_fn=_die_with_parent,
            )
        return cls(name, process, log)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.returncode is None

    @property
    def ending(self) -> str:
        """How it ended: ``exit status 1`` or ``killed by SIGKILL``."""
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def failed(self) -> ChildFailed:
        """The error for a child that did not become ready."""
        return ChildFailed(f"{self.name} did not start, {self.ending}:\n{self.tail()}".rstrip(":\n"))

    def tail(self, lines: int = 12) -> str:
        """The last lines of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    async def wait_for_line(self, beginning: str, timeout_s: float) -> str:
        """The first log line that begins so.

        Raises:
            ChildFailed: the child ended first, or the time is over.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            for line in self.tail(200).splitlines():
                if line.startswith(beginning):
                    return line
            if not self.alive or asyncio.get_running_loop().time() > deadline:
                raise self.failed()
            await asyncio.sleep(0.05)

    async def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL for the whole group; returns when it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def _die_with_parent() -> None:
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
