"""KV events tell that a prompt is computed, long before the record of its request's end."""

from __future__ import annotations

from dataclasses import replace

from extproc.api.request import InferenceRequest, Prompt
from extproc.core import Core
from extproc.kvcache import token_chain
from extproc.kvcache.rank import Rank
from tests.unit.core_parts import core, end, request, spec
from tests.unit.kv_engine import BLOCK, KvEngine
from tests.unit.test_ledger import assert_nothing_left

A = spec("a")
TOKENS = list(range(10 * BLOCK))


class Setup:
    """One engine with KV events."""

    def __init__(self) -> None:
        self.built: Core = core([A])
        self.engine = KvEngine()
        self.endpoint = self.built.fleet.endpoints[A.key]
        self.rank: Rank = self.built.view.ranks.add(self.endpoint.slot, 0, can_replay=False)
        self.engine.prompt([7] * BLOCK)  # the first block tells its size
        self.pump(0.0)

    def ask(self, id: str, now: float, tokens: list[int] = TOKENS) -> None:
        asked: InferenceRequest = request(id, "x" * 4 * len(tokens))
        prompt = Prompt(asked.prompt.pieces, size=asked.prompt.size, tokens=token_chain.packed(tokens))
        self.built.dispatcher.decide(replace(asked, prompt=prompt), now)

    def pump(self, now: float) -> None:
        for message in self.engine.sent:
            self.rank.message(*message)
        self.engine.sent = []
        while self.rank.step():
            pass
        self.built.ledger.told(self.endpoint.slot, now)


def test_a_prompt_that_events_tell_of_waits_no_longer() -> None:
    setup = Setup()
    setup.ask("r1", 1.0)
    setup.pump(1.1)
    assert setup.endpoint.backlog.unstarted == 1
    setup.engine.prompt(TOKENS)
    setup.pump(1.2)
    assert (setup.endpoint.backlog.unstarted, setup.endpoint.backlog.charged) == (0, 0)
    assert setup.endpoint.leases == 1


def test_half_of_a_prompt_is_not_the_prompt() -> None:
    setup = Setup()
    setup.ask("r1", 1.0)
    setup.engine.prompt(TOKENS[: 5 * BLOCK])
    setup.pump(1.2)
    assert setup.endpoint.backlog.unstarted == 1


def test_what_was_cached_before_tells_nothing() -> None:
    setup = Setup()
    setup.engine.prompt(TOKENS)
    setup.pump(0.5)
    setup.ask("r1", 1.0)
    setup.engine.prompt([9] * BLOCK)
    setup.pump(1.1)
    assert setup.endpoint.backlog.unstarted == 1


def test_the_record_still_teaches_how_long_it_took_and_leaves_nothing() -> None:
    setup = Setup()
    tokens = list(range(2000))
    setup.ask("r1", 1.0, tokens)
    setup.engine.prompt(tokens)
    setup.pump(1.2)
    setup.built.ledger.ended(end("r1", A, ttft_s=0.2, usage=None), 3.0)
    assert setup.endpoint.rates.measured != setup.endpoint.rates.prior
    assert_nothing_left(setup.built)
    assert not setup.built.ledger._awaited


def test_a_request_that_ends_untold_leaves_nothing() -> None:
    setup = Setup()
    setup.ask("r1", 1.0)
    setup.built.ledger.ended(end("r1", A), 3.0)
    assert_nothing_left(setup.built)
    assert not setup.built.ledger._awaited
