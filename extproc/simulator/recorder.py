"""Keeps the last requests as they arrived, for tests that compare bytes."""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from typing import Any


class Recorder:
    """The last ``limit`` requests; of each body at most ``body_bytes`` (its digest and size are of the
    whole)."""

    def __init__(self, limit: int, body_bytes: int) -> None:
        self._requests: deque[dict[str, Any]] = deque(maxlen=limit)
        self._body_bytes = body_bytes

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return bool(self._requests.maxlen)

    def add(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> None:
        """Keep one request."""
        self._requests.append(
            {
                "method": method,
                "target": target,
                "headers": headers,
                "size": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
                "body_base64": base64.b64encode(body[: self._body_bytes]).decode(),
            }
        )

    def last(self, limit: int) -> list[dict[str, Any]]:
        """The last ``limit`` requests, newest last."""
        return list(self._requests)[-limit:] if limit > 0 else []

    def clear(self) -> None:
        """Forget all."""
        self._requests.clear()
