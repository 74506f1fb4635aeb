"""extproc's own log: JSON for collectors or text for people, on standard error, written by a thread.

Rules of this file:

- nothing here ever sees a prompt: what is logged of a request are the fields of :func:`request_line`;
- ``extra={...}`` of a log call becomes fields of the line;
- values that come from clients are quoted and shortened, so that they can neither forge lines nor fill the
  disk;
- the event loop only puts records into a bounded queue; what does not fit is dropped and counted.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from extproc.telemetry.decision import DecisionRecord

_STANDARD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
_LONGEST = 300


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields given as ``extra`` to the log call."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the extra fields, an exception's text."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: _short(value) for name, value in fields_of(record).items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """``time level message name=value …``; strings with anything odd in them are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its end."""
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        message = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        parts = [when, f"{record.levelname:<7}", message]
        parts += [f"{name}={_text(_short(value))}" for name, value in fields_of(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _DroppingHandler(logging.handlers.QueueHandler):
    """Puts records into a bounded queue; never waits, never prints."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # The listener is in this process: nothing need be pickled, and the formatter wants exc_info.
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class Logs:
    """The logging set-up of one process; ``close`` writes what is queued and gives the root logger back."""

    def __init__(self, style: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
        waiting: queue.Queue[logging.LogRecord] = queue.Queue(10_000)
        self._handler = _DroppingHandler(waiting)
        writer = logging.StreamHandler(stream or sys.stderr)
        writer.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
        self._listener = logging.handlers.QueueListener(waiting, writer)
        root = logging.getLogger()
        self._before = root.level, list(root.handlers)
        root.handlers = [self._handler]
        root.setLevel(level.upper())
        # It tells every event it sees, our own log file's among them.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        self._listener.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written because the stream was too slow."""
        return self._handler.dropped

    def close(self) -> None:
        """Write what is queued and stop."""
        root = logging.getLogger()
        root.level, root.handlers = self._before
        self._listener.stop()


def request_line(record: DecisionRecord) -> Mapping[str, object]:
    """Fields of the line that is logged when a request has ended: ``log.info("request",
    extra=request_line(record))``.
    """
    ending, rejection = record.ending, record.rejection
    line: dict[str, object] = {
        "request_id": record.id,
        "api": record.api,
        "model": record.model,
        "pool": record.pool,
        "route": record.route,
        "tenant": record.tenant,
        "prompt_tokens": record.prompt_tokens,
        "matched_tokens": record.matched_tokens,
    }
    if rejection is not None:
        return line | {"status": rejection.status, "outcome": "refused", "reason": rejection.reason}
    if ending is None:
        return line
    line |= {"endpoint": ending.endpoint.key, "outcome": ending.outcome.value, "reason": ending.reason}
    line["attempts"] = ending.attempts
    end = ending.end
    if end is not None:
        line |= {
            "status": end.status,
            "waiting_s": end.waiting_s,
            "ttft_s": end.ttft_s,
            "engine_s": end.engine_s,
            "duration_s": end.duration_s,
            "response_bytes": end.response_bytes,
            "details": end.details,
            "flags": ",".join(end.flags),
        }
        if end.usage is not None:
            usage = end.usage
            line |= {
                "input_tokens": usage.input,
                "cached_tokens": usage.cached,
                "output_tokens": usage.output,
            }
    return line


def _short(value: object) -> object:
    if isinstance(value, str) and len(value) > _LONGEST:
        return value[:_LONGEST] + "…"
    return value


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    plain = text.isprintable() and text and not any(mark in text for mark in ' "=\\')
    return text if plain else msgspec.json.encode(text).decode()
