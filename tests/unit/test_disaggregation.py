"""Where to prefill and where to decode."""

from __future__ import annotations

import pytest

from extproc.fleet.endpoint import Endpoint, Lifecycle, Role
from extproc.scheduling.disaggregation import Prefiller, choose, prefillers
from extproc.scheduling.strategy import Choice
from tests.unit.core_parts import core, end, request, spec


def endpoint(name: str, slot: int, role: Role, backlog: float = 0.0) -> Endpoint:
    made = Endpoint(spec(name, role=role), slot, 1000.0)
    made.backlog.add(int(backlog), 0.0, 1000.0)
    return made


def chosen(
    decoders: list[Choice], candidates: list[Endpoint], prompt: int = 2000, held: dict[int, int] | None = None
) -> tuple[list[str], Prefiller | None]:
    order, prefiller = choose(
        decoders,
        candidates,
        held or {},
        prompt,
        0.0,
        min_uncached_tokens=500,
        transfer_rate=100_000.0,
        in_seconds=True,
    )
    return [choice.endpoint.spec.cluster for choice in order], prefiller


def test_a_decode_endpoint_is_spared_long_prompts() -> None:
    decoder, helper = endpoint("d", 0, Role.DECODE), endpoint("p", 1, Role.PREFILL)
    order, prefiller = chosen([Choice(decoder, 2.0)], [helper])
    assert order == ["d"]
    assert prefiller == Prefiller(helper, 2000)


@pytest.mark.parametrize(("prompt", "matched"), [(400, 0), (2000, 1600)])
def test_few_uncached_tokens_are_decoded_alone(prompt: int, matched: int) -> None:
    decoder, helper = endpoint("d", 0, Role.DECODE), endpoint("p", 1, Role.PREFILL)
    assert chosen([Choice(decoder, 1.0, matched_tokens=matched)], [helper], prompt)[1] is None


def test_an_endpoint_of_both_roles_takes_help_only_where_it_is_faster() -> None:
    both, helper = endpoint("b", 0, Role.BOTH), endpoint("p", 1, Role.PREFILL)
    assert chosen([Choice(both, 2.0)], [helper])[1] is None
    busy = endpoint("b", 0, Role.BOTH, backlog=3000)
    assert chosen([Choice(busy, 5.0)], [helper])[1] == Prefiller(helper, 2000)


def test_the_prefiller_is_the_soonest_ready_with_the_prompt() -> None:
    decoder = endpoint("d", 0, Role.DECODE)
    busy, warm = endpoint("p", 1, Role.PREFILL), endpoint("q", 2, Role.PREFILL, backlog=1000)
    assert chosen([Choice(decoder, 2.0)], [busy, warm])[1] == Prefiller(busy, 2000)
    assert chosen([Choice(decoder, 2.0)], [busy, warm], held={2: 1500})[1] == Prefiller(warm, 500)


def test_with_help_the_order_of_decode_endpoints_is_made_anew() -> None:
    queued = endpoint("queued", 0, Role.DECODE, backlog=5000)
    idle = endpoint("idle", 1, Role.DECODE)
    helper = endpoint("p", 2, Role.PREFILL)
    # The queued one has fewer streams; its queue of prompts does not matter to a prompt prefilled elsewhere.
    order, _ = chosen([Choice(idle, 4.0), Choice(queued, 7.0)], [helper])
    assert order == ["queued", "idle"]


def test_only_ready_prefill_endpoints_that_serve_the_adapter_are_asked() -> None:
    helper, both = endpoint("p", 0, Role.PREFILL), endpoint("b", 1, Role.BOTH)
    assert prefillers([helper, both], 0.0) == [helper]
    assert prefillers([helper], 0.0, adapter="tuned") == []
    helper.lifecycle = Lifecycle.DRAINING
    assert prefillers([helper], 0.0) == []


def test_the_prefill_endpoint_carries_the_backlog_until_the_first_token() -> None:
    decode, prefill = spec("d", role=Role.DECODE), spec("p", role=Role.PREFILL, port=9000)
    made = core([decode, prefill], strategy="expected-latency")
    decided = made.dispatcher.decide(request("r", "long " * 2000), 0.0)
    assert decided.headers == (("x-prefiller-host-port", "10.0.0.1:9000"),)  # type: ignore[union-attr]
    d, p = made.fleet.endpoints[decode.key], made.fleet.endpoints[prefill.key]
    assert p.backlog.tokens(0.0, 8000.0) > 2000
    assert d.backlog.tokens(0.0, 8000.0) == 0
    assert (d.leases, p.leases) == (1, 0)
    made.take(end("r", decode), 1.0)
    assert p.backlog.unstarted == 0
    again = made.dispatcher.decide(request("s", "long " * 2000), 2.0)
    assert again.headers == ()  # type: ignore[union-attr]


def test_a_request_that_never_began_leaves_no_backlog_and_no_cache_behind() -> None:
    decode, prefill = spec("d", role=Role.DECODE), spec("p", role=Role.PREFILL, port=9000)
    made = core([decode, prefill], strategy="expected-latency")
    made.dispatcher.decide(request("r", "long " * 2000), 0.0)
    made.ledger.drop("r", 0.1)
    p = made.fleet.endpoints[prefill.key]
    assert p.backlog.unstarted == 0
    assert made.view.index.blocks_of(p.slot) == 0
