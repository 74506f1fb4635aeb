"""Reading traces: what kind a file is, is told from its first line.

| kind | first line | what is known |
|---|---|---|
| block-hash trace | JSON with ``hash_ids`` | ``timestamp`` (ms), ``input_length``, ``output_length``, an id per 512 tokens |
| lengths | CSV header | arrival time, context tokens, generated tokens; no two prompts share anything |
| decision log of ours | JSON with ``prompt_tokens`` and ``blocks`` | seeded hashes of the first blocks, lengths, adapter |

Times start at the first request; ``rate_scale`` of 2 makes everything happen twice as fast. A decision log holds no
more than the first blocks of a prompt; what follows is taken to be nobody else's.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from extproc.kvcache.hashing import BLOCK_BYTES
from extproc.replay.arrival import Arrival, unique_blocks
from extproc.replay.errors import ReplayError

HASH_BLOCK = 512
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
    except msgspec.DecodeError as error:
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


def _decisions(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Arrival]:
    run = BLOCK_BYTES // 4
    for at, line in lines:
        row = _json(path, at, line)
        try:
            tokens = max(int(row["prompt_tokens"]), 1)  # type: ignore[call-overload]
            outcome = row.get("outcome") or {}
            output = int(outcome.get("output_tokens") or 0)  # type: ignore[attr-defined]
            blocks = [int(name, 16) for name in row["blocks"]]  # type: ignore[attr-defined]
            wanted = -(-tokens // run)
            blocks = [*blocks, *unique_blocks(max(wanted - len(blocks), 0))][: max(wanted, 1)]
            yield Arrival(
                str(row["id"]),
                float(row["at"]),  # type: ignore[arg-type]
                tokens,
                output,
                blocks,
                run,
                stream=bool(row.get("stream", True)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReplayError(f"{path}:{at}: {type(error).__name__} {error}") from error
