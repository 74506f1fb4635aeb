"""Tokenises prompts in a few threads, and never lets a request wait for long.

Rules of this file:

- a request waits for its tokens until ``deadline_s``; then it is routed without them, and the thread goes on, so
  that the conversation's next turn finds its beginning known;
- at most a few requests a thread are taken on; more are routed without tokens at once;
- tokenizers are loaded in a thread when a configuration first names their folder; until then, and where that
  fails (logged once), their pools do without.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extproc.api.request import Api
from extproc.edge.tokenizer_files import ModelTokenizer, TokenizerError, load

log = logging.getLogger(__name__)

_WAITING_A_THREAD = 8
_SWITCH_S = 0.001
"""How long a thread may keep the interpreter from the event loop (Python's own default is 5 ms)."""


class TokenizerPool:
    """Tokenizers by pool."""

    def __init__(self, *, threads: int = 2, deadline_s: float = 0.02, max_tokens: int = 4_000_000) -> None:
        self.deadline_s = deadline_s
        self.results: Counter[str] = Counter()
        """Requests by what became of them: tokens, late, busy, not_followed, refused, failed."""
        self._threads = threads
        self._max_tokens = max_tokens
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._folders: dict[str, Path] = {}
        self._loaded: dict[Path, ModelTokenizer | None] = {}
        self._loading: dict[Path, asyncio.Task[None]] = {}
        self._waiting = 0

    def __bool__(self) -> bool:
        return bool(self._folders)

    @property
    def remembered(self) -> int:
        """Tokens remembered by all tokenizers (gauge)."""
        return sum(one.memo.tokens for one in self._loaded.values() if one is not None)

    @property
    def cap(self) -> int:
        """Bound of ``remembered`` (gauge)."""
        return self._max_tokens * max(len(self._loaded), 1)

    @property
    def broken(self) -> list[str]:
        """Pools whose tokenizer gave other tokens in pieces than as a whole, and no longer remembers."""
        return [
            pool
            for pool, folder in self._folders.items()
            if (one := self._loaded.get(folder)) is not None and one.memo.broken
        ]

    def install(self, folders: Mapping[str, Path]) -> None:
        """Take over a configuration: pool -> folder. Loading goes on in the background."""
        self._folders = dict(folders)
        for folder in [one for one in self._loaded if one not in folders.values()]:
            del self._loaded[folder]
        for folder in set(folders.values()):
            if folder not in self._loaded and folder not in self._loading:
                sys.setswitchinterval(_SWITCH_S)
                self._loading[folder] = asyncio.ensure_future(self._load(folder))

    async def tokens(self, pool: str, api: Api, body: bytes) -> bytes | None:
        """Packed tokens of a request's prompt, or None: no tokenizer, not followed, refused, or not in time."""
        folder = self._folders.get(pool)
        tokenizer = None if folder is None else self._loaded.get(folder)
        if tokenizer is None:
            return None
        if self._waiting >= self._threads * _WAITING_A_THREAD:
            self.results["busy"] += 1
            return None
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, tokenizer.tokens, api, body)
        future.add_done_callback(self._done)
        await asyncio.wait({future}, timeout=self.deadline_s)
        if not future.done():
            self.results["late"] += 1
            return None
        error = future.exception()
        if error is not None:
            from extproc.kvcache.chat_text import TemplateError  # an extra: see tokenizer_files

            self.results["refused" if isinstance(error, TemplateError) else "failed"] += 1
            if not isinstance(error, TemplateError):
                log.error("tokenizer failed", extra={"pool": pool, "error": type(error).__name__})
            return None
        found = future.result()
        self.results["tokens" if found is not None else "not_followed"] += 1
        return found

    async def loaded(self) -> None:
        """Wait until everything named so far is loaded or has failed."""
        await asyncio.gather(*self._loading.values())

    def close(self) -> None:
        """Let the threads go."""
        for task in self._loading.values():
            task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[bytes | None]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # looked at, so that asyncio does not complain of late ones

    async def _load(self, folder: Path) -> None:
        try:
            self._loaded[folder] = await asyncio.to_thread(load, folder, max_tokens=self._max_tokens)
        except TokenizerError as error:
            self._loaded[folder] = None
            log.error("tokenizer not used", extra={"folder": str(folder), "error": str(error)})
        finally:
            self._loading.pop(folder, None)
