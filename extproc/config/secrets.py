"""Secrets that stand in the environment or in files: read when the configuration is, never kept in it."""

from __future__ import annotations

import os
from pathlib import Path

from extproc.routing.identity import digest

_MOST_BYTES = 1 << 20


class SecretError(Exception):
    """A secret cannot be read; the text says which and why, and nothing of its content."""


def secret(reference: str) -> str:
    """The text behind ``env:NAME`` or ``file:PATH``, without the line's end.

    Raises:
        SecretError: it is not there, or empty.
    """
    kind, _, name = reference.partition(":")
    if kind == "env":
        text = os.environ.get(name, "")
        if not text.strip():
            raise SecretError(f"the environment has no variable `{name}`; set it, or write `file:PATH`")
        return text.strip()
    try:
        path = Path(name)
        if path.stat().st_size > _MOST_BYTES:
            raise SecretError(f"`{name}` is too large for a file of keys")
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SecretError(f"`{name}` cannot be read: {why}") from None
    if not text:
        raise SecretError(f"`{name}` is empty")
    return text


def key_digests(reference: str) -> list[bytes]:
    """Digests of the keys behind one entry of ``keys``: ``sha256:HEX``, ``env:NAME``, or a file with a key or
    ``sha256:HEX`` a line (``#`` begins a comment).

    Raises:
        SecretError: it cannot be read.
    """
    if reference.startswith("sha256:"):
        return [bytes.fromhex(reference[7:])]
    lines = [line.strip() for line in secret(reference).splitlines()]
    return [_digest(line) for line in lines if line and not line.startswith("#")]


def files(references: list[str]) -> tuple[Path, ...]:
    """The files among these references: they are watched."""
    found = [Path(reference[5:]) for reference in references if reference.startswith("file:")]
    return tuple(dict.fromkeys(found))


def _digest(line: str) -> bytes:
    if line.startswith("sha256:") and len(line) == 71:
        return bytes.fromhex(line[7:])
    return digest(line)
