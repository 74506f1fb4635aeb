"""Reading traces: what kind a file is, is told from its first line.

| kind | first line | what is known |
|---|---|---|
| block-hash trace | JSON with ``hash_ids`` | ``timestamp`` (ms), ``input_length``, ``output_length``, an id per 512 tokens |
| lengths | CSV header | arrival time, context tokens, generated tokens; no two prompts share anything |
| decision log of ours | JSON with ``prompt_tokens`` and ``blocks`` | seeded hashes of blocks, lengths, adapter |

Times start at the first request; ``rate_scale`` of 2 makes everything happen twice as fast. A decision log holds the
first blocks of a prompt and marks of further ones; behind the last mark that two prompts share they are taken to differ.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median

import msgspec

from extproc.kvcache.hashing import BLOCK_BYTES
from extproc.replay.arrival import MOST_BLOCKS, Arrival, unique_blocks
from extproc.replay.errors import ReplayError

HASH_BLOCK = 512
_NAME = 0xFFFFFFFFFFFFFFFF
_ODD = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: keeps names made from one hash apart."""
_MOST_DAYS = 7
"""Engines are scraped every second of it."""
_TIME = ("timestamp", "time", "arrivedat", "arrivaltime", "at")
_INPUT = ("contexttokens", "inputtokens", "inputlength", "prompttokens", "requesttokens")
_OUTPUT = ("generatedtokens", "outputtokens", "outputlength", "completiontokens", "responsetokens")


def read_trace(path: Path, *, rate_scale: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """The arrivals of a file, in order of time.

    Raises:
        ReplayError: the file cannot be read or understood; says file and line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(_read(path, lines, limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path}: {error}") from error
    if not rows:
        raise ReplayError(f"{path}: there are no requests in it")
    rows.sort(key=lambda row: row.at)
    start = rows[0].at
    days = (rows[-1].at - start) / rate_scale / 86_400
    if not days <= _MOST_DAYS:
        raise ReplayError(
            f"{path}: its requests are spread over {days:.6g} days, {_MOST_DAYS} are the most; is a clock wrong? "
            "--rate-scale makes it shorter"
        )
    return [_moved(row, start, rate_scale) for row in rows[:limit]]


def _moved(row: Arrival, start: float, rate_scale: float) -> Arrival:
    return Arrival(
        row.id,
        (row.at - start) / rate_scale,
        row.prompt_tokens,
        row.output_tokens,
        row.blocks,
        row.block_tokens,
        row.session,
        row.adapter,
        row.stream,
    )


def _read(path: Path, lines: Iterable[str], limit: int | None) -> Iterator[Arrival]:
    numbered = ((at, line) for at, line in enumerate(lines, 1) if line.strip())
    try:
        at, first = next(numbered)
    except StopIteration:
        return
    if not first.lstrip().startswith("{"):
        yield from itertools.islice(_csv(path, first, numbered), limit)
        return
    everything = itertools.chain([(at, first)], numbered)
    row = _json(path, at, first)
    if "hash_ids" in row:
        yield from itertools.islice(_hashes(path, everything), limit)
    elif "prompt_tokens" in row and "blocks" in row:
        # Written in order of the ends: all of it is read before any is cut off.
        yield from _decisions(path, everything)
    else:
        raise ReplayError(f"{path}:{at}: neither a block-hash trace (hash_ids) nor a decision log (blocks)")


def _json(path: Path, at: int, line: str) -> dict[str, object]:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ReplayError(f"{path}:{at}: {error}") from error
    if not isinstance(row, dict):
        raise ReplayError(f"{path}:{at}: not a JSON object")
    return row


def _hashes(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Arrival]:
    for number, (at, line) in enumerate(lines):
        row = _json(path, at, line)
        try:
            tokens = int(row["input_length"])  # type: ignore[call-overload]
            output = int(row["output_length"])  # type: ignore[call-overload]
            time_s = float(row["timestamp"]) / 1e3  # type: ignore[arg-type]
            blocks = [int(name) for name in row["hash_ids"]]  # type: ignore[attr-defined]
            session = row.get("session_id")
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayError(f"{path}:{at}: {type(error).__name__} {error}") from error
        blocks += unique_blocks(max(-(-tokens // HASH_BLOCK) - len(blocks), 0))
        yield Arrival(
            str(number),
            time_s,
            max(tokens, 1),
            max(output, 0),
            blocks or unique_blocks(1),
            HASH_BLOCK,
            str(session) if session is not None else None,
        )


def _csv(path: Path, header: str, lines: Iterable[tuple[int, str]]) -> Iterator[Arrival]:
    names = ["".join(filter(str.isalnum, name)).lower() for name in next(csv.reader([header]))]
    columns = [
        next((names.index(name) for name in wanted if name in names), None)
        for wanted in (_TIME, _INPUT, _OUTPUT)
    ]
    if None in columns:
        raise ReplayError(
            f"{path}: the header row must name a time, the context tokens and the generated tokens, as in "
            "TIMESTAMP,ContextTokens,GeneratedTokens"
        )
    time_at, input_at, output_at = (column or 0 for column in columns)
    for number, (at, line) in enumerate(lines):
        cells = next(csv.reader([line]))
        try:
            tokens, output = int(float(cells[input_at])), int(float(cells[output_at]))
            time_s = _seconds(cells[time_at])
        except (IndexError, ValueError) as error:
            raise ReplayError(f"{path}:{at}: {error}") from error
        tokens = max(tokens, 1)
        yield Arrival(
            str(number), time_s, tokens, max(output, 0), unique_blocks(-(-tokens // HASH_BLOCK)), HASH_BLOCK
        )


def _seconds(cell: str) -> float:
    """A number of seconds, or a date and time."""
    try:
        return float(cell)
    except ValueError:
        # More than six digits of a second are more than datetime takes.
        head, dot, rest = cell.strip().partition(".")
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        return datetime.fromisoformat(head + dot + digits[:6] + rest[len(digits) :]).timestamp()


class _Mark(msgspec.Struct):
    depth: int
    hash: str


class _Outcome(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Decision(msgspec.Struct):
    """What of a decision record is replayed."""

    id: str
    at: float
    prompt_tokens: int
    blocks: list[str]
    marks: list[_Mark] = []
    prompt_bytes: int = 0
    adapter: str = ""
    stream: bool = True
    outcome: _Outcome | None = None

    @property
    def tokens(self) -> int:
        """As the engine counted them, else as they were estimated."""
        told = self.outcome.input_tokens if self.outcome is not None else None
        return max(told or self.prompt_tokens, 1)


def _decisions(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Arrival]:
    rows = []
    for at, line in lines:
        try:
            rows.append((at, msgspec.json.decode(line, type=_Decision)))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ReplayError(f"{path}:{at}: {error}") from error
    # One size of a block for all, or what two prompts share would not be in the same places.
    sizes = [row.prompt_bytes / row.tokens for _, row in rows[:1000] if row.prompt_bytes]
    run = max(round(BLOCK_BYTES / (median(sizes) if sizes else 4.0)), 1)
    for at, row in rows:
        try:
            yield Arrival(
                row.id,
                row.at,
                row.tokens,
                max((row.outcome.output_tokens if row.outcome is not None else None) or 0, 0),
                _named(row, -(-row.tokens // run)),
                run,
                adapter=row.adapter or None,
                stream=row.stream,
            )
        except (ValueError, ReplayError) as error:
            raise ReplayError(f"{path}:{at}: {error}") from error


def _named(row: _Decision, wanted: int) -> list[int]:
    """Names of a prompt's blocks. Between two marks a block is named after the later one: who has that has it too."""
    names = [int(name, 16) for name in row.blocks]
    for mark in row.marks:
        if not len(names) < mark.depth <= MOST_BLOCKS:
            raise ValueError(f"a mark at depth {mark.depth} behind {len(names)} blocks")
        name = int(mark.hash, 16)
        names.extend((name + ahead * _ODD) & _NAME for ahead in range(mark.depth - len(names) - 1, -1, -1))
    names.extend(unique_blocks(max(wanted - len(names), 0)))
    return names[: max(wanted, 1)]
