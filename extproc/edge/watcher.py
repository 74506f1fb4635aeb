"""When files change: a set of them, settled.

Rules of this file:

- what counts is each file's identity, size and time, seen through symbolic links (a Kubernetes ConfigMap
  swaps a link);
- system events wake us (of these names only: a log file may lie beside), and a poll every two seconds where
  there are none (network file systems, a directory that does not exist yet);
- a change is told when size and time have stood still for ``settle_s``: no half-written file, and an edit of
  two files is one change;
- an absent file is a state like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import watchfiles

Fingerprint = Mapping[Path, tuple[int, int, int] | None]
_POLL_MS = 2000


def fingerprint(paths: Iterable[Path]) -> Fingerprint:
    """``(inode, size, modification time)`` of every file; None for one that is not there."""
    return {path: _identity(path) for path in paths}


async def changes(
    paths: Iterable[Path], *, settle_s: float = 0.3, since: Fingerprint | None = None
) -> AsyncIterator[frozenset[Path]]:
    """Yield the files that changed, each time the set has settled again. Never ends by itself.

    ``since``: the state the caller has read already (default: the state now), so that no change falls
    between.
    """
    watched = tuple(paths)
    known = dict(since if since is not None else fingerprint(watched))
    directories = {path.absolute().parent for path in watched}
    waker = asyncio.Event()
    names = frozenset(path.name for path in watched)
    tasks = [asyncio.create_task(_wake(directory, names, waker)) for directory in sorted(directories)]
    try:
        while True:
            current = await asyncio.to_thread(fingerprint, watched)
            if current == known:
                await waker.wait()
                waker.clear()
                continue
            await asyncio.sleep(settle_s)
            if await asyncio.to_thread(fingerprint, watched) != current:
                continue
            changed = frozenset(path for path in watched if current[path] != known.get(path))
            known = dict(current)
            yield changed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wake(directory: Path, names: frozenset[str], waker: asyncio.Event) -> None:
    """Set ``waker`` at every event that concerns one of the names, and at every poll."""

    def concerns(_: watchfiles.Change, path: str) -> bool:
        name = os.path.basename(path)
        # Kubernetes swaps the link `..data`, not the file's own name.
        return name in names or name.startswith("..")

    while True:
        with contextlib.suppress(OSError, RuntimeError):
            async for _ in watchfiles.awatch(
                directory,
                watch_filter=concerns,
                recursive=False,
                debounce=50,
                step=20,
                rust_timeout=_POLL_MS,
                yield_on_timeout=True,
            ):
                waker.set()
        # The directory is not there (or went away): look again later.
        await asyncio.sleep(_POLL_MS / 1000)
        waker.set()


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
