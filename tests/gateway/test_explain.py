"""``extproc explain`` on narrow and wide screens, and both terminal views through the command."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from extproc.telemetry.explain import explain, why
from tests.gateway.gateway_process import Lab, chat, running_lab

TERMS = ("queue s", "prefill s", "stall s", "slots s", "adapter s", "decode s", "pressure s", "session s")


def record(candidates: int = 3, holder: int | None = None, **changes: Any) -> dict[str, Any]:
    """A record as the admin page gives it; ``holder`` holds 6,000 tokens."""
    rows = [
        {
            "endpoint": f"engine-{number}/127.0.0.1:{8000 + number}",
            "cost": 0.25 + number / 8,
            "terms": [number / 8, 0.25, 0.0001, 0.0, 0.0, 0.0, 0.0],
            "matched_tokens": 6000 if number == holder else 0,
            "leases": number,
        }
        for number in range(candidates)
    ]
    return {
        "id": "6f1c2a9e-0c2a-4b5e-9a67-2f5e3ad0b111",
        "at": 1.7e9,
        "api": "chat",
        "model": "m",
        "stream": True,
        "pool": "chat",
        "route": "default",
        "version": "",
        "tenant": "anonymous",
        "strategy": "expected-latency",
        "prompt_bytes": 24_000,
        "prompt_tokens": 6200,
        "matched_tokens": 0,
        "media": 0,
        "terms": list(TERMS),
        "candidates": rows,
        "candidates_total": candidates,
        "removed": [{"endpoint": "engine-99/127.0.0.1:8099", "reason": "draining"}],
        "removed_total": 1,
        "chosen": rows[0]["endpoint"] if rows else "",
        "fallbacks": [rows[1]["endpoint"]] if candidates > 1 else [],
        "rejection": None,
        "took_us": 80.0,
        "outcome": None,
        **changes,
    }


def shown(said: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(explain(said))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("candidates", [1, 3, 16])
def test_every_term_and_the_choice_are_readable(width: int, candidates: int) -> None:
    lines = shown(record(candidates, holder=candidates - 1), width)
    text = "\n".join(lines)
    for word in (
        *(term.removesuffix(" s") for term in TERMS),
        "cost s",
        "tokens held",
        "open leases",
        "CHOSEN",
        "engine-99",
        "draining",
    ):
        assert word in text
    assert "…" not in text
    assert max(map(len, lines)) <= width


def test_the_usual_record_fits_on_24_lines() -> None:
    outcome = {
        "status": 200,
        "outcome": "success",
        "reason": "ok",
        "endpoint": "engine-0/127.0.0.1:8000",
        "attempts": 1,
        "waiting_s": 0.001,
        "ttft_s": 0.1,
        "duration_s": 1.0,
        "input_tokens": 6200,
        "cached_tokens": 0,
        "output_tokens": 50,
        "details": "via_upstream",
        "flags": [],
    }
    lines = shown(record(3, holder=0, outcome=outcome, removed=[], removed_total=0), 80)
    assert len(lines) < 24, "one is for the prompt of the shell"


def test_zero_terms_are_dots_and_small_ones_are_not_zero() -> None:
    lines = {line[:11].strip(): line.split()[2:] for line in shown(record(3), 80)}
    assert lines["stall s"] == ["<0.001"] * 3
    assert lines["queue s"] == ["·", "0.125", "0.250"]


def test_what_is_zero_everywhere_is_one_line() -> None:
    lines = shown(record(3), 80)
    assert "zero: slots, adapter, decode, pressure, tokens held" in lines
    assert not any(line.startswith("adapter s") for line in lines)


def test_who_holds_most_is_shown_however_expensive() -> None:
    text = "\n".join(shown(record(16, holder=15), 80))
    assert "engine-15" in text
    assert "and 10 more, see --json" in text


def test_the_reason_in_a_sentence() -> None:
    assert why(record(1)) == "engine-0 was the only one that could take it"
    assert why(record(3)) == "nobody holds any of the prompt; engine-0 costs least, 0.250 s"
    assert why(record(3, holder=0)) == (
        "engine-0 holds 6000 of 6200 prompt tokens, no other as much, 0.250 s"
    )
    both = record(3, holder=0)
    both["candidates"][1]["matched_tokens"] = 6000
    assert "no other more" in why(both)
    assert why(record(3, holder=2)) == (
        "engine-2 holds 6000 tokens and engine-0 0, but the first costs more (0.500 s) than the second (0.250 s)"
    )
    assert why(record(3, chosen="")) == ""


def test_scores_are_not_called_seconds() -> None:
    said = record(2, terms=["cache", "load"], strategy="weighted-score")
    text = "\n".join(shown(said, 80))
    assert "in seconds" not in text
    assert "cost s" not in text
    assert why(said) == "engine-0 came first by weighted-score"


def test_a_rejection_says_what_the_client_was_told() -> None:
    rejection = {
        "status": 429,
        "code": "overloaded",
        "reason": "queue_full",
        "message": "try later",
        "retry_after_s": 2.0,
    }
    text = "\n".join(shown(record(0, chosen="", rejection=rejection, fallbacks=[]), 80))
    for word in ("429 overloaded (queue_full)", "try later", "2 s"):
        assert word in text


async def command(*words: str) -> str:
    """Output of ``extproc …`` into a pipe."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80"},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def in_terminal(columns: int, *words: str) -> str:
    """Output of ``extproc …`` on a terminal of that width."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", *words),
        stdin=theirs,
        stdout=theirs,
        env={**environment, "TERM": "dumb"},
    )
    os.close(theirs)
    assert await process.wait() == 0
    output = bytearray()
    try:
        while part := os.read(mine, 65_536):
            output += part
    except OSError:  # Linux says EIO when the other side is closed and all is read
        pass
    finally:
        os.close(mine)
    return output.decode()


async def asked(lab: Lab) -> str:
    """The id, as its client saw it, of one finished request."""
    status, headers, _ = await lab.post(chat("why here?"))
    assert status == 200
    await lab.extproc.idle()
    return headers["x-gateway-request-id"]


async def test_the_commands_on_a_running_gateway(tmp_path: Path) -> None:
    settings = {"responses": {"headers": True}}
    async with running_lab(tmp_path, ["engine-1", "engine-2"], settings=settings) as lab:
        request_id = await asked(lab)
        admin = ("--admin", lab.extproc.admin_url)
        piped = await command("explain", request_id, *admin)
        assert "CHOSEN" in piped
        assert "prefill s" in piped
        assert "200 success" in piped
        narrow = await in_terminal(80, "explain", request_id, *admin)
        assert "CHOSEN" in narrow
        assert "prefill s" in narrow
        said = json.loads(await command("explain", request_id, "--json", *admin))
        assert said["id"] == request_id
        fleet = json.loads(await command("fleet", "--json", *admin))
        assert sum(row["ended_1m"] for row in fleet["endpoints"]) == 1
        table = (await command("fleet", *admin)).splitlines()
        assert "scraped" in table[0], "a pipe gets every column"
