"""Decision records as a file, one JSON object a line, rotated by size.

Rules of this file: the event loop only puts records into a bounded queue; rendering and writing are a
thread's work; a record that does not fit is dropped and counted; a disk that fails is said once and tried
again with the next record.
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from extproc.telemetry.decision import DecisionRecord, render

_LOG = logging.getLogger(__name__)


class DecisionLog:
    """Writes to ``path``; older files are ``path.1`` (the newest) to ``path.N``, ``files`` of them in all."""

    def __init__(
        self, path: Path, *, max_bytes: int = 100 << 20, files: int = 5, queued: int = 10_000
    ) -> None:
        self.path = path
        self.dropped = 0
        self.written = 0
        self._max_bytes = max_bytes
        self._files = files
        self._queue: queue.Queue[DecisionRecord | None] = queue.Queue(queued)
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = None
        self._size = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, record: DecisionRecord) -> None:
        """Queue a finished record. Never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and stop; whatever takes longer than ``timeout_s`` is lost."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            record = self._queue.get()
            if record is None:
                break
            try:
                self._append(self._encoder.encode(render(record)) + b"\n")
                self._failed = False
            except OSError as error:
                self.dropped += 1
                self._shut()
                if not self._failed:
                    _LOG.warning("decision log %s: %s", self.path, error)
                self._failed = True
        self._shut()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._size = self._file.tell()
        if self._size and self._size + len(line) > self._max_bytes:
            self._rotate()
        assert self._file is not None
        self._file.write(line)
        self._size += len(line)
        self.written += 1

    def _rotate(self) -> None:
        self._shut()
        for number in range(self._files - 1, 0, -1):
            source = self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))
        self._file = self.path.open("ab" if self._files > 1 else "wb", buffering=0)
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _shut(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
