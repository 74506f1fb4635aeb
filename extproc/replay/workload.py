"""Generated workloads: a few numbers in YAML become a trace, the same for the same seed.

Rules of this file:

- arrivals of sessions (or single requests) are a Poisson process; the turns of a session follow each other after an
  exponential thinking time and a nominal reply, however fast the engines are: open loop, nobody waits for us;
- lengths are lognormal around the given means (coefficient of variation ``spread``); what is hot (systems,
  documents, adapters) is drawn by Zipf's law with exponent ``zipf``;
- content is a chain of runs of 64 tokens: a session's prompt is its system prompt and all its turns and answers so
  far, so the answer of one turn is found in the cache by the next.

| key | meaning |
|---|---|
| ``kind`` | ``sessions``, ``documents`` or ``mix`` |
| ``systems``, ``system_tokens`` | how many system prompts, and their length |
| ``turns``, ``first_tokens``, ``turn_tokens``, ``answer_tokens`` | mean number of turns; mean new tokens and answers |
| ``think_s`` | mean seconds between an answer and the next turn |
| ``documents``, ``document_tokens``, ``per_request``, ``question_tokens`` | retrieval |
| ``adapters`` | number of LoRA adapters, 0: none |
| ``parts`` | of a mix: workloads with a ``share`` of the requests each |
"""

from __future__ import annotations

import difflib
import heapq
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import yaml

from extproc.replay.arrival import Arrival
from extproc.replay.errors import ReplayError

RUN = 64
_REPLY_S = 3.0
"""Nominal time an answer takes, for the arrival of the next turn."""
_NUMBERS: dict[str, float] = {
    "systems": 1,
    "system_tokens": 0,
    "turns": 1,
    "first_tokens": 200,
    "turn_tokens": 100,
    "answer_tokens": 200,
    "think_s": 20,
    "documents": 100,
    "document_tokens": 1000,
    "per_request": 3,
    "question_tokens": 100,
    "adapters": 0,
    "spread": 0.8,
    "zipf": 1.0,
}
_KINDS = ("sessions", "documents", "mix")


@dataclass(slots=True, frozen=True)
class Workload:
    """One workload's numbers, checked."""

    name: str
    kind: str
    about: str
    numbers: Mapping[str, float]
    parts: tuple[tuple[float, Workload], ...] = ()


@dataclass(slots=True)
class _Draft:
    """A request whose place in the order of arrival is not known yet."""

    prompt_tokens: int
    output_tokens: int
    blocks: list[int]
    session: str | None
    adapter: str | None


def builtin_names() -> list[str]:
    """Names of the workloads that come with the package."""
    folder = resources.files("extproc.replay").joinpath("workloads")
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def no_such_trace(name: str) -> ReplayError:
    """What to say of a name that is neither a file nor a built-in workload."""
    known = builtin_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return ReplayError(f"{name}: no such file or built-in workload{hint} Built in: {', '.join(known)}")


def load_workload(name: str) -> Workload:
    """A built-in workload by name, or a YAML file of your own by path.

    Raises:
        ReplayError: there is none, or its numbers make no sense.
    """
    if name in builtin_names():
        text = resources.files("extproc.replay").joinpath("workloads", f"{name}.yaml").read_text("utf-8")
    else:
        try:
            text = Path(name).read_text("utf-8")
        except FileNotFoundError:
            raise no_such_trace(name) from None
        except OSError as error:
            raise ReplayError(f"{name}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ReplayError(f"{name}: {error}") from error
    try:
        return _checked(Path(name).stem, yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ReplayError(f"{name}: {error}") from error
    except RecursionError:
        raise ReplayError(f"{name}: parts inside of themselves") from None


def _checked(name: str, values: Any) -> Workload:
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        raise ReplayError(f"workload {name}: kind must be one of {', '.join(_KINDS)}")
    known = {"kind", "about", "parts", "share", *_NUMBERS}
    numbers = dict(_NUMBERS)
    for key, value in values.items():
        if key not in known:
            raise ReplayError(f"workload {name}: {key!r} is not one of {', '.join(sorted(known))}")
        if key in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise ReplayError(f"workload {name}: {key} must be a number from 0, not {value!r}")
            numbers[key] = float(value)
    parts: list[tuple[float, Workload]] = []
    if values["kind"] == "mix":
        if not isinstance(values.get("parts"), list) or not values["parts"]:
            raise ReplayError(f"workload {name}: a mix needs parts")
        for at, part in enumerate(values["parts"]):
            made = _checked(f"{name} part {at + 1}", part)
            share = part.get("share", 1.0)
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not share > 0:
                raise ReplayError(f"workload {name}: the share of part {at + 1} must be above 0")
            parts.append((float(share), made))
    return Workload(name, values["kind"], str(values.get("about", "")), numbers, tuple(parts))


def generate(workload: Workload, requests: int, rate: float, seed: int) -> list[Arrival]:
    """``requests`` arrivals at ``rate`` a second on average.

    Sessions that run when the trace begins are in it with their later turns only, so that the mix of early and late
    turns is steady from the start.
    """
    names = count(1 << 20)
    drafts = _drafts(workload, requests, rate, random.Random(f"{workload.name} {seed}"), names)
    made = []
    start: float | None = None
    for number, (at, draft) in enumerate(drafts):
        start = at if start is None else start
        made.append(
            Arrival(
                str(number),
                at - start,
                draft.prompt_tokens,
                draft.output_tokens,
                draft.blocks,
                RUN,
                draft.session,
                draft.adapter,
            )
        )
        if len(made) == requests:
            break
    return made


def _drafts(
    workload: Workload, requests: int, rate: float, rng: random.Random, names: Iterator[int]
) -> Iterator[tuple[float, _Draft]]:
    if workload.kind == "mix":
        total = sum(share for share, _ in workload.parts)
        streams = [
            _drafts(part, requests, rate * share / total, random.Random(rng.random()), names)
            for share, part in workload.parts
        ]
        return heapq.merge(*streams, key=lambda pair: pair[0])
    if workload.kind == "documents":
        return _documents(workload.numbers, rate, rng, names)
    return _sessions(workload.numbers, requests, rate, rng, names)


def _sessions(
    numbers: Mapping[str, float], requests: int, rate: float, rng: random.Random, names: Iterator[int]
) -> Iterator[tuple[float, _Draft]]:
    turns, think = max(numbers["turns"], 1.0), numbers["think_s"]
    systems = _Zipf(int(numbers["systems"]), numbers["zipf"])
    adapters = _Zipf(int(numbers["adapters"]), numbers["zipf"])
    heads: dict[tuple[int, int], list[int]] = {}
    system = int(numbers["system_tokens"])
    spread = numbers["spread"]
    lasts = turns * (think + _REPLY_S) if turns > 1 else 0.0
    # Sessions start as long before the trace as they last, so that it begins with a steady mix of turns.
    starts = -3.0 * lasts
    waiting: list[tuple[float, int, Iterator[tuple[float, _Draft]], _Draft]] = []
    next_start = starts
    for serial in count():
        next_start += rng.expovariate(rate / turns)
        while waiting and waiting[0][0] <= next_start:
            at, order, session, draft = heapq.heappop(waiting)
            if at >= 0.0:
                yield at, draft
            following = next(session, None)
            if following is not None:
                heapq.heappush(waiting, (following[0], order, session, following[1]))
        which, adapter = systems.draw(rng), adapters.draw(rng)
        head = heads.get((which, adapter))
        if head is None:
            head = heads[which, adapter] = [next(names) for _ in range(system // RUN)]
        session = _session(numbers, next_start, serial, head, system, adapter, spread, rng, names)
        first = next(session)
        heapq.heappush(waiting, (first[0], serial, session, first[1]))


def _session(
    numbers: Mapping[str, float],
    at: float,
    serial: int,
    head: list[int],
    system: int,
    adapter: int,
    spread: float,
    rng: random.Random,
    names: Iterator[int],
) -> Iterator[tuple[float, _Draft]]:
    stream = list(head)
    tokens = system
    # Geometric: most sessions are short, some very long.
    stop = 1.0 / max(numbers["turns"], 1.0)
    turn = 0
    while True:
        mean = numbers["turn_tokens"] if turn else numbers["first_tokens"]
        tokens += _length(mean, spread, rng)
        answer = _length(numbers["answer_tokens"], spread, rng)
        while len(stream) * RUN < tokens + answer:
            stream.append(next(names))
        session = f"s{serial}" if numbers["turns"] > 1 else None
        yield (
            at,
            _Draft(
                tokens, answer, list(stream), session, f"adapter-{adapter}" if numbers["adapters"] else None
            ),
        )
        tokens += answer
        turn += 1
        if rng.random() < stop:
            return
        at += _REPLY_S + rng.expovariate(1.0 / numbers["think_s"]) if numbers["think_s"] else _REPLY_S


def _documents(
    numbers: Mapping[str, float], rate: float, rng: random.Random, names: Iterator[int]
) -> Iterator[tuple[float, _Draft]]:
    hot = _Zipf(int(numbers["documents"]), numbers["zipf"])
    spread = numbers["spread"]
    # In runs, so that documents begin where blocks begin: a template pads them, or engines would never find them.
    lengths = [max(_length(numbers["document_tokens"], spread, rng) // RUN, 1) for _ in range(hot.size)]
    chain: dict[tuple[int, int], list[int]] = {}
    head = [next(names) for _ in range(int(numbers["system_tokens"]) // RUN)]
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        picked: list[int] = []
        while len(picked) < min(int(numbers["per_request"]), hot.size):
            document = hot.draw(rng)
            if document not in picked:
                picked.append(document)
        blocks = list(head)
        for document in picked:
            before = blocks[-1] if blocks else -1
            found = chain.get((before, document))
            if found is None:
                found = chain[before, document] = [next(names) for _ in range(lengths[document])]
            blocks += found
        tokens = len(blocks) * RUN + _length(numbers["question_tokens"], spread, rng)
        answer = _length(numbers["answer_tokens"], spread, rng)
        while len(blocks) * RUN < tokens:
            blocks.append(next(names))
        yield at, _Draft(tokens, answer, blocks, None, None)


class _Zipf:
    """Numbers 0…size-1, the first most often."""

    def __init__(self, size: int, exponent: float) -> None:
        self.size = max(size, 1)
        self._sums = list(accumulate(1.0 / (rank + 1) ** exponent for rank in range(self.size)))

    def draw(self, rng: random.Random) -> int:
        return rng.choices(range(self.size), cum_weights=self._sums)[0] if self.size > 1 else 0


def _length(mean: float, spread: float, rng: random.Random) -> int:
    """Lognormal with this mean and coefficient of variation, at least one token and at most twenty times the mean."""
    sigma = math.sqrt(math.log1p(spread * spread))
    drawn = rng.lognormvariate(math.log(max(mean, 1.0)) - sigma * sigma / 2, sigma)
    return max(min(round(drawn), round(20 * mean)), 1)
