"""What to send and when: arrivals and prompts, the same for the same seed.

Rules of this file:

- a workload is an endless or finite iterator of :class:`Ask`; nothing is made before it is asked for;
- prompts are words of a small fixed list, one word a token for the usual tokenisers (about 4 bytes); equal
  block ids give equal text, and a block cut short is the beginning of the whole one;
- traces: JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one id per 512
  prompt tokens); CSV with a header row ``TIMESTAMP,ContextTokens,GeneratedTokens`` (no ids: no two prompts
  share a block);
- ``scale`` divides the times of a trace: 2 sends twice as fast.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path

BLOCK_TOKENS = 512
_BYTES_PER_TOKEN = 4

# 64 words of three letters: with the space before it each is one token in the common vocabularies.
_LIST = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now "
    "old see two way who boy did its let put say she too use dad mom car dog run sun sea sky map box cup "
    "key pen bag bed bus cat eye hat ice job leg red big six"
)
_WORDS = tuple(_LIST.split())
assert len(_WORDS) == 64


class WorkloadError(Exception):
    """The workload's words or file cannot be understood; says where."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload: when, how long, and its prompt."""

    at_s: float
    prompt: str
    output_tokens: int

    def body(self, model: str, *, stream: bool) -> bytes:
        """The chat completion request. ``ignore_eos`` makes engines generate the length the workload says."""
        text = json.dumps(self.prompt)
        options = ',"stream":true,"stream_options":{"include_usage":true}' if stream else ""
        return (
            f'{{"model":{json.dumps(model)},"messages":[{{"role":"user","content":{text}}}],'
            f'"max_tokens":{self.output_tokens},"temperature":0,"ignore_eos":true{options}}}'
        ).encode()


@lru_cache(maxsize=16_384)
def block(name: str, seed: str) -> str:
    """The 512 words (2 KB) of a block, a pseudo-random function of its name and the seed."""
    digest = hashlib.shake_128(f"{seed}\0{name}".encode()).digest(BLOCK_TOKENS)
    return "".join(" " + _WORDS[byte & 63] for byte in digest)


def text(names: Iterator[str], tokens: int, seed: str) -> str:
    """The first ``tokens`` words of these blocks, one after another."""
    pieces = []
    left = tokens
    for name in names:
        if left <= 0:
            break
        pieces.append(block(name, seed)[: left * _BYTES_PER_TOKEN])
        left -= BLOCK_TOKENS
    return "".join(pieces)


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Endless arrival times with independent gaps of mean ``1 / rate`` seconds."""
    random_source = random.Random(f"arrivals {seed}")
    at = 0.0
    while True:
        at += random_source.expovariate(rate)
        yield at


def fixed(
    prompt_bytes: int, output_tokens: int, times: Iterator[float], seed: str, *, prompts: int = 64
) -> Iterator[Ask]:
    """Prompts of one size, ``prompts`` different ones in turn."""
    tokens = max(1, prompt_bytes // _BYTES_PER_TOKEN)
    blocks = -(-tokens // BLOCK_TOKENS)
    made = [
        text((f"fixed {number} {place}" for place in range(blocks)), tokens, seed)
        for number in range(prompts)
    ]
    for number, at in enumerate(times):
        yield Ask(at, made[number % prompts], output_tokens)


def trace(path: Path, seed: str, *, scale: float = 1.0) -> Iterator[Ask]:
    """A trace file in one of the two forms. Raises WorkloadError with file and line."""
    read = _csv if path.suffix.lower() == ".csv" else _jsonl
    start: float | None = None
    for line, (at, tokens, output, names) in enumerate(read(path), start=1):
        if start is None:
            start = at
        if tokens < 0 or output < 0:
            raise WorkloadError(f"{path}:{line}: a length below zero")
        yield Ask((at - start) / scale, text(names, tokens, seed), max(1, output))


Row = tuple[float, int, int, Iterator[str]]


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                ids = row["hash_ids"]
                tokens = int(row["input_length"])
                yield (
                    float(row["timestamp"]) / 1e3,
                    tokens,
                    int(row["output_length"]),
                    _with_rest(ids, number),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise WorkloadError(f"{path}:{number}: {error!r}") from error


def _with_rest(ids: list[int], line: int) -> Iterator[str]:
    """The ids; where a trace has too few for its length, blocks nobody shares."""
    for found in ids:
        yield f"id {found}"
    place = 0
    while True:
        yield f"line {line} {place}"
        place += 1


def _csv(path: Path) -> Iterator[Row]:
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=2):
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
                yield at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), _with_rest([], number)
            except (ValueError, KeyError, TypeError) as error:
                raise WorkloadError(f"{path}:{number}: {error!r}") from error


def size(words: str) -> int | None:
    """Bytes from ``4KB``, ``220KB``, ``1MB`` or a plain number (1 KB = 1,024); None for anything else."""
    upper = words.upper()
    for ending, factor in (("KB", 1024), ("MB", 1024**2), ("B", 1), ("", 1)):
        if upper.endswith(ending) and upper.removesuffix(ending).isdigit():
            return int(upper.removesuffix(ending)) * factor
    return None


def named(
    words: str, *, rate: float, scale: float, output_tokens: int, prompts: int
) -> Callable[[str, str], Iterator[Ask]]:
    """The workload a command line names, a size or a trace file, as a function of (arrival seed, text seed).

    Raises WorkloadError.
    """
    prompt_bytes = size(words)
    if prompt_bytes is not None:
        return lambda arrivals, texts: fixed(
            prompt_bytes, output_tokens, poisson(rate, arrivals), texts, prompts=prompts
        )
    path = Path(words)
    if not path.is_file():
        raise WorkloadError(f"{words}: no size like 4KB, and no trace file")
    return lambda arrivals, texts: trace(path, texts, scale=scale)
