"""Whose turn it is: fair shares, priorities, guaranteed shares, deadlines, bounds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.policy import Policy
from extproc.admission.queue import PoolQueue
from extproc.admission.ticket import Ticket
from extproc.routing.tenant import Tenant
from tests.unit.core_parts import request

NORMAL = Policy(max_wait_s=30.0, aging_s=0.0)


def ticket(
    name: str,
    tenant: str = "a",
    *,
    priority: int = 0,
    weight: float = 1.0,
    cost: float = 100.0,
    now: float = 0.0,
    wait: float = 30.0,
) -> Ticket:
    made = Ticket(request(name), Tenant(tenant, priority=priority, weight=weight), now)
    made.cost, made.flow, made.deadline = cost, tenant, now + wait
    made.request.body_size = 10
    return made


def fill(queue: PoolQueue, *tickets: Ticket, now: float = 0.0) -> None:
    for one in tickets:
        queue.push(one, now)


def drain(queue: PoolQueue, count: int = 10**9, now: float = 0.0) -> list[Ticket]:
    out = []
    while len(out) < count and (one := queue.next(now)) is not None:
        queue.served(one, now)
        out.append(one)
    return out


def names(tickets: list[Ticket]) -> list[str]:
    return [one.request.id for one in tickets]


def test_a_tenant_is_served_in_the_order_of_arrival() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, *(ticket(f"r{n}", cost=100 - n) for n in range(9)))
    assert names(drain(queue)) == [f"r{n}" for n in range(9)]
    assert (queue.requests, queue.bytes) == (0, 0)


def test_who_floods_the_queue_does_not_delay_the_others() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, *(ticket(f"flood{n}", "flood") for n in range(1000)), ticket("other", "other"))
    assert "other" in names(drain(queue, 2))


def test_tenants_share_tokens_not_requests_by_their_weights() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, *(ticket(f"a{n}", "a", cost=100) for n in range(1000)))
    fill(queue, *(ticket(f"b{n}", "b", cost=400, weight=2.0) for n in range(1000)))
    got: Counter[str] = Counter()
    while sum(got.values()) < 60_000:
        (one,) = drain(queue, 1)
        got[one.tenant.name] += int(one.cost)
    assert got["b"] / got["a"] == pytest.approx(2.0, rel=0.03)


def test_what_was_really_used_counts_for_the_share() -> None:
    """Both tenants' requests look alike, but one's answers are three times as long."""
    queue = PoolQueue(NORMAL)
    for name in "ab":
        fill(queue, *(ticket(f"{name}{n}", name, cost=100) for n in range(600)))
    used: Counter[str] = Counter()
    for _ in range(400):
        (one,) = drain(queue, 1)
        tokens = 300 if one.flow == "a" else 100
        used[one.flow] += tokens
        queue.correct((0, one.flow, one.cost), tokens)
    assert used["a"] == pytest.approx(used["b"], rel=0.03)


def test_a_tenant_that_was_away_gains_nothing() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, *(ticket(f"a{n}", "a") for n in range(200)))
    drain(queue, 100)
    fill(queue, *(ticket(f"b{n}", "b") for n in range(100)))
    assert Counter(one.tenant.name for one in drain(queue, 40)) == {"a": 20, "b": 20}


def test_higher_priorities_first_but_lower_ones_get_their_share() -> None:
    queue = PoolQueue(NORMAL)
    for priority in (10, 0, -10):
        fill(queue, *(ticket(f"{priority}/{n}", f"t{priority}", priority=priority) for n in range(1000)))
    got = Counter(one.tenant.priority for one in drain(queue, 900))
    assert got[-10] + got[0] == pytest.approx(180, abs=3)
    assert min(got[0], got[-10]) > 60


def test_what_the_middle_gets_in_its_turn_leaves_the_share_to_the_lowest() -> None:
    queue = PoolQueue(NORMAL)
    for priority in (0, -10):
        fill(queue, *(ticket(f"{priority}/{n}", f"t{priority}", priority=priority) for n in range(1000)))
    got: Counter[int] = Counter()
    for step in range(1000):
        if step % 10 < 6:  # the highest needs six tenths, and never waits long
            fill(queue, ticket(f"h{step}", "h", priority=10, now=step / 10), now=step / 10)
        got.update(one.tenant.priority for one in drain(queue, 1, now=step / 10))
    assert got[10] == pytest.approx(600, abs=5)
    assert got[-10] == pytest.approx(200, abs=10)


def test_without_a_guaranteed_share_lower_priorities_wait() -> None:
    queue = PoolQueue(Policy(min_share=0.0, aging_s=0.0))
    fill(queue, *(ticket(f"h{n}", priority=1) for n in range(50)), *(ticket(f"l{n}", "b") for n in range(50)))
    assert {one.tenant.priority for one in drain(queue, 50)} == {1}


def test_a_share_is_not_saved_up_while_nobody_wants_it() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, *(ticket(f"h{n}", priority=1) for n in range(1000)))
    drain(queue, 900)
    fill(queue, *(ticket(f"l{n}", "low") for n in range(100)))
    assert Counter(one.tenant.priority for one in drain(queue, 20))[0] <= 5


def test_a_request_that_waited_long_counts_as_one_priority_higher_but_never_as_the_highest() -> None:
    queue = PoolQueue(Policy(aging_s=10.0, min_share=0.0), highest=10)
    fill(queue, ticket("old", "old", priority=-10))
    fill(queue, *(ticket(f"n{n}", "n", now=11.0) for n in range(3)), now=11.0)
    assert names(drain(queue, 1, now=11.0)) == ["old"]
    fill(queue, ticket("older", "old", priority=-10, now=11.0), now=11.0)
    fill(queue, *(ticket(f"c{n}", "c", priority=10, now=90.0) for n in range(2)), now=90.0)
    assert names(drain(queue, 3, now=90.0)) == ["c0", "c1", "n0"]


def test_by_deadline_the_nearest_goes_first() -> None:
    queue = PoolQueue(Policy(order="deadline", aging_s=0.0))
    fill(queue, ticket("late", "a", wait=20), ticket("soon", "b", wait=5), ticket("middle", "c", wait=10))
    assert names(drain(queue)) == ["soon", "middle", "late"]


def test_expired_requests_are_told_once() -> None:
    queue = PoolQueue(NORMAL)
    first, second = ticket("a", wait=1), ticket("b", wait=2)
    fill(queue, first, second)
    assert queue.first_deadline == 1
    assert queue.expired(0.9) == []
    assert queue.expired(1.0) == [first]
    queue.remove(first, 1.0)
    assert queue.expired(1.5) == []
    assert queue.expired(3.0) == [second]


def test_who_leaves_is_out_at_once_wherever_he_stood() -> None:
    queue = PoolQueue(NORMAL)
    tickets = [ticket(f"r{n}") for n in range(5)]
    fill(queue, *tickets)
    for place in (0, 2, 4):
        queue.remove(tickets[place], 0.0)
        queue.remove(tickets[place], 0.0)
    assert (queue.requests, queue.bytes) == (2, 20)
    assert names(drain(queue)) == ["r1", "r3"]


def test_a_full_queue_makes_place_for_higher_priorities_from_the_longest_flow() -> None:
    queue = PoolQueue(Policy(max_requests=4, aging_s=0.0))
    fill(queue, ticket("x", "x", priority=-1), *(ticket(f"y{n}", "y", priority=-1) for n in range(3)))
    higher = ticket("h", "h")
    assert queue.is_full(higher)
    victim = queue.to_make_place(higher)
    assert victim is not None
    assert victim.request.id == "y2"
    assert queue.to_make_place(ticket("same", "z", priority=-1)) is None


def test_a_queue_is_bounded_in_bytes_too() -> None:
    queue = PoolQueue(Policy(max_bytes=25))
    fill(queue, ticket("a"))
    assert not queue.is_full(ticket("b"))
    fill(queue, ticket("b"))
    assert queue.is_full(ticket("c"))


def test_the_predicted_wait_is_the_work_ahead_over_the_learned_rate() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, *(ticket(f"r{n}") for n in range(300)))
    assert queue.predicted_wait(ticket("x"), 0.0) is None
    for step in range(100):  # 10 requests of 100 tokens a second
        drain(queue, 1, now=step / 10)
    now = 10.0
    assert queue.predicted_wait(ticket("x"), now) == pytest.approx(20.0, rel=0.1)
    # Another tenant shares from now on, and a higher priority goes before.
    assert queue.predicted_wait(ticket("x", "new"), now) == 0.0
    assert queue.predicted_wait(ticket("x", "new", priority=5), now) == 0.0


def test_a_queue_that_stands_still_sheds_nobody() -> None:
    """The engine's only place may be held by a generation that takes minutes."""
    queue = PoolQueue(Policy(max_wait_s=400.0, aging_s=0.0))
    fill(queue, *(ticket(f"r{n}", wait=400) for n in range(10)))
    for step in range(4):
        drain(queue, 1, now=step / 10)
    for now in range(1, 300):
        assert queue.hopeless(float(now)) == []
    assert queue.predicted_wait(ticket("x"), 300.0) is None
    assert queue.requests == 6


def test_what_cannot_start_in_time_is_cut_from_the_lowest_priority() -> None:
    queue = PoolQueue(Policy(max_wait_s=10.0, aging_s=0.0))
    fill(queue, *(ticket(f"l{n}", "low", priority=-1, wait=10) for n in range(100)))
    fill(queue, *(ticket(f"h{n}", "high", wait=10) for n in range(20)))
    for step in range(20):
        drain(queue, 1, now=step / 10)
    cut = queue.hopeless(2.0)
    assert {one.tenant.name for one in cut} == {"low"}
    assert cut[0].request.id == "l99"
    # 1000 tokens a second, of which the low ones are sure of a fifth, for eight seconds.
    assert 10 <= queue.requests - 4 <= 40


def test_parked_flows_take_no_turn_until_a_place_is_free() -> None:
    queue = PoolQueue(NORMAL)
    fill(queue, ticket("a0", "a"), ticket("a1", "a"), ticket("b0", "b"))
    first = queue.next(0.0)
    assert first is not None
    queue.park(first, ("tenant", "a"))
    assert names(drain(queue)) == ["b0"]
    assert queue.unpark(("tenant", "a"), 1)
    assert names(drain(queue)) == ["a0", "a1"]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "serve", "cancel", "expire", "park"]),
        st.integers(0, 5),
        st.integers(-1, 1),
        st.integers(1, 500),
    ),
    max_size=150,
)


@given(ACTIONS, st.randoms(use_true_random=False), st.sampled_from(["fair", "deadline"]))
def test_nobody_is_lost_or_served_twice(
    actions: list[tuple[str, int, int, int]], rng: random.Random, order: str
) -> None:
    queue = PoolQueue(Policy(order=order, aging_s=3.0), highest=1)
    now, made, waiting, gone = 0.0, 0, {}, set()
    for what, tenant, priority, cost in actions:
        now += 0.1
        if what == "serve":
            one = queue.next(now)
            if one is not None:
                queue.served(one, now)
                del waiting[one.request.id]
                gone.add(one.request.id)
        elif what == "cancel" and waiting:
            one = waiting.pop(rng.choice(sorted(waiting)))
            queue.remove(one, now)
        elif what == "expire":
            for one in queue.expired(now):
                queue.remove(one, now)
                del waiting[one.request.id]
        elif what == "park":
            one = queue.next(now)
            if one is not None:
                queue.park(one, ("tenant", one.flow))
        else:
            made += 1
            one = ticket(
                f"r{made}", f"t{tenant}", priority=priority, cost=cost, now=now, wait=rng.uniform(0.1, 9)
            )
            queue.push(one, now)
            waiting[one.request.id] = one
        assert queue.requests == len(waiting)
        assert queue.bytes == 10 * len(waiting)
        assert sum(band.tokens for band in queue.bands) == pytest.approx(
            sum(t.cost for t in waiting.values())
        )
    for key in queue.parked_keys():
        queue.unpark(key, 10**6)
    left = names(drain(queue, now=now))
    assert sorted(left) == sorted(waiting)
    assert not gone & set(left)
