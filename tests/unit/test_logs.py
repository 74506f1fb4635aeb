"""The log: fields, no forged lines, never in the way."""

from __future__ import annotations

import io
import json
import logging

import pytest

from extproc.edge.logs import JsonFormatter, Logs, TextFormatter, request_line
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.ledger import Lease, Settlement
from extproc.outcome import End, Outcome, Usage
from extproc.routing.rejection import model_not_found
from extproc.telemetry.decision import DecisionRecord


def line(message: str, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("extproc.test", logging.INFO, "f.py", 1, message, (), None)
    vars(record).update(extra)
    return record


def test_json_lines_carry_the_fields() -> None:
    said = json.loads(JsonFormatter().format(line("request", pool="chat", ttft_s=0.25)))
    assert (said["level"], said["logger"], said["message"]) == ("info", "extproc.test", "request")
    assert (said["pool"], said["ttft_s"]) == ("chat", 0.25)


def test_text_lines_carry_the_fields() -> None:
    assert (
        TextFormatter()
        .format(line("request", pool="chat", ttft_s=0.25))
        .endswith("INFO    request pool=chat ttft_s=0.25")
    )


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_clients_value_cannot_forge_a_line_or_fill_the_disk(formatter: logging.Formatter) -> None:
    text = formatter.format(line("request", model="x\n12:00 INFO fake" + "y" * 5000))
    assert "\n" not in text
    assert len(text) < 800


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_lines_come_out_and_the_root_logger_is_given_back(stream: io.StringIO) -> None:
    before = list(logging.getLogger().handlers)
    logs = Logs("json", "info", stream)
    logging.getLogger("extproc.x").info("hello", extra={"pool": "chat"})
    logging.getLogger("extproc.x").debug("not this")
    logs.close()
    assert [json.loads(text)["message"] for text in stream.getvalue().splitlines()] == ["hello"]
    assert logging.getLogger().handlers == before


def test_exceptions_are_part_of_their_line(stream: io.StringIO) -> None:
    logs = Logs("json", "info", stream)
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("x").exception("failed")
    logs.close()
    assert "ValueError: wrong" in json.loads(stream.getvalue())["exception"]


def test_a_request_line_says_where_and_how_it_ended() -> None:
    record = DecisionRecord(
        "r1", 0.0, api="chat", model="m", pool="chat", prompt_tokens=100, matched_tokens=64
    )
    endpoint = Endpoint(EndpointSpec("c", "a:1", "chat"), 0)
    end = End("r1", "c", "a:1", 200, "via_upstream", (), 0.2, 1.0, 0.01, 1.1, 900, 1, Usage(100, 20, 64))
    record.settled(Settlement(Lease("r1", endpoint, 0.0), Outcome.SUCCESS, "ok", end))
    said = request_line(record)
    assert (said["endpoint"], said["status"], said["ttft_s"], said["output_tokens"]) == (
        "c/a:1",
        200,
        0.2,
        20,
    )


def test_a_request_line_of_a_refusal() -> None:
    said = request_line(DecisionRecord("r1", 0.0, rejection=model_not_found("x", [])))
    assert (said["outcome"], said["status"], said["reason"]) == ("refused", 404, "model_not_found")
