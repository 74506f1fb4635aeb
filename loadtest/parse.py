"""What reading one request costs: parse, prompt pieces and model span, without a network.

Run ``python loadtest/parse.py``. Prints the best and the median of many runs in microseconds, and the
median as a multiple of ``json.loads`` of the same body in the same run, which is what compares between
machines.
"""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Callable
from statistics import median

from extproc.api.parse import parse
from extproc.api.request import RequestHead
from extproc.api.splice import splice

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "i",
    "this",
    "are",
    "or",
    "his",
    "from",
    "at",
]
CHAT = "/v1/chat/completions"


def prose(size: int, rng: random.Random) -> str:
    """About ``size`` bytes of text with the escapes that prompts have (newlines, quotes)."""
    out: list[str] = []
    length = 0
    while length < size:
        line = " ".join(rng.choices(WORDS, k=12)) + ' "quoted"\n'
        out.append(line)
        length += len(line)
    return "".join(out)[:size]


def chat(turns: int, size: int, rng: random.Random) -> dict[str, object]:
    """A chat of ``size`` bytes in ``turns`` turns."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": prose(size // turns, rng)} for i in range(turns)
    ]
    return {"model": "meta-llama/Llama-3.1-8B-Instruct", "messages": messages, "stream": True}


def agent(turns: int, size: int, rng: random.Random) -> dict[str, object]:
    """As agents send it: tools, tool calls, content parts."""
    messages: list[object] = []
    for index in range(turns):
        text = prose(size // turns, rng)
        if index % 2:
            function = {"name": "edit", "arguments": json.dumps({"path": "a.py", "text": text})}
            call = {"id": f"call_{index}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(20)
    ]
    return {"model": "meta-llama/Llama-3.1-8B-Instruct", "tools": tools, "messages": messages}


def cases() -> list[tuple[str, str, bytes]]:
    """Name, path and body of everything measured."""
    rng = random.Random(7)
    made: list[tuple[str, str, object]] = []
    for name, size in (("4 KB", 4_000), ("220 KB", 220_000), ("1 MB", 1_000_000)):
        made.append((f"{name}, 1 message", CHAT, chat(1, size, rng)))
        made.append((f"{name}, 100 messages", CHAT, chat(100, size, rng)))
        made.append((f"{name}, agent, 100 messages", CHAT, agent(100, size, rng)))
    tokens = [rng.randrange(128_000) for _ in range(32_000)]
    made.append(("32k token ids", "/v1/completions", {"model": "m", "prompt": tokens}))
    url = "data:image/png;base64," + base64.b64encode(rng.randbytes(3 << 18)).decode()
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    made.append(("1 MB image", CHAT, {"model": "m", "messages": [{"role": "user", "content": parts}]}))
    made.append(("1 MB, lone surrogate", CHAT, chat(1, 1_000_000, rng) | {"user": "\ud800"}))
    return [(name, path, json.dumps(body).encode()) for name, path, body in made]


def measure(call: Callable[[], object], seconds: float = 0.4) -> tuple[float, float]:
    """Best and median microseconds of one call."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return min(samples), median(samples)


def main() -> None:
    """Measure every case and print a table."""
    print(f"{'body':30} {'bytes':>9} {'best us':>9} {'median us':>9} {'/ json.loads':>12} {'splice us':>9}")
    for name, path, body in cases():
        head = RequestHead("id", "POST", path, "", {"content-type": "application/json"})
        best, middle = measure(lambda head=head, body=body: parse(head, body))
        _, reference = measure(lambda body=body: json.loads(body))
        span = parse(head, body).model_span
        assert span is not None
        _, splicing = measure(lambda body=body, span=span: splice(body, span, "another/model"), 0.1)
        ratio = middle / reference
        print(f"{name:30} {len(body):9} {best:9.0f} {middle:9.0f} {ratio:12.2f} {splicing:9.1f}")


if __name__ == "__main__":
    main()
