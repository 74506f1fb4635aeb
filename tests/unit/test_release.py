"""Releases: the plan's state machine, who gets which version, what a restart remembers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from extproc.config.schema.release import ReleaseSettings
from extproc.outcome import End
from extproc.release.plan import Guards, Plan, Step
from extproc.release.releases import Releases
from extproc.release.rollout import Event, Refused, Rollout, State
from extproc.release.split import version_at
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from tests.unit.core_parts import core, end, request, spec

STEPS = (Step(0.05, 300), Step(0.25, 600), Step(1.0))
PLAN = Plan("llama", "v1", "v2", STEPS, Guards(min_samples=10))


def running(plan: Plan = PLAN) -> Rollout:
    rollout = Rollout(plan)
    rollout.tick(0.0, available=True)
    return rollout


def feed(rollout: Rollout, count: int, *, candidate: bool, failed: bool = False) -> None:
    for _ in range(count):
        rollout.watch.request(candidate=candidate, failed=failed, ttft_s=None)


class TestSteps:
    def test_nobody_gets_a_candidate_that_has_no_endpoint(self) -> None:
        rollout = Rollout(PLAN)
        assert rollout.tick(0.0, available=False) is None
        assert (rollout.state, rollout.share) == (State.WAITING, 0.0)
        event = rollout.tick(1.0, available=True)
        assert event is not None
        assert (event.kind, event.share_before, event.share) == ("started", 0.0, 0.05)

    def test_a_step_ends_when_it_was_held_and_enough_was_seen(self) -> None:
        rollout = running()
        assert rollout.tick(299.0, available=True) is None
        assert rollout.tick(301.0, available=True) is None, "held, but nothing was seen"
        feed(rollout, 10, candidate=True)
        event = rollout.tick(302.0, available=True)
        assert event is not None
        assert (event.kind, event.share, rollout.samples) == ("step", 0.25, 0)

    def test_a_hundred_percent_completes_it(self) -> None:
        rollout = running()
        rollout.promote()
        assert (rollout.promote().kind, rollout.state, rollout.share) == ("completed", State.COMPLETE, 1.0)
        assert rollout.tick(9e9, available=True) is None

    def test_blue_green_is_one_step(self) -> None:
        rollout = running(Plan("llama", "blue", "green", (Step(1.0),)))
        assert (rollout.state, rollout.share) == (State.COMPLETE, 1.0)
        assert rollout.rollback("bad").share == 0.0

    def test_the_last_step_may_be_less_than_everybody(self) -> None:
        rollout = running(Plan("llama", "v1", "v2", (Step(0.5, 10),), Guards(min_samples=0)))
        event = rollout.tick(11.0, available=True)
        assert event is not None
        assert (event.kind, event.share) == ("completed", 1.0)

    def test_time_away_is_not_time_held(self) -> None:
        rollout = running()
        rollout.tick(100.0, available=True)
        restored = Rollout(PLAN)
        restored.load(json.loads(json.dumps(rollout.dump())))
        restored.tick(9000.0, available=True)
        assert restored.held_s == 100.0


class TestByHand:
    def test_a_pause_keeps_the_share_and_promote_goes_on(self) -> None:
        rollout = running()
        rollout.pause()
        feed(rollout, 100, candidate=True)
        assert rollout.tick(9000.0, available=True) is None
        assert (rollout.share, rollout.promote().kind, rollout.share) == (0.05, "resumed", 0.05)

    def test_rollback_takes_everybody_back_in_one_step(self) -> None:
        rollout = running()
        rollout.promote()
        event = rollout.rollback("smells")
        assert (event.share_before, event.share, event.reason) == (0.25, 0.0, "smells")
        with pytest.raises(Refused):
            rollout.rollback()

    def test_promote_after_a_rollback_begins_anew(self) -> None:
        rollout = running()
        rollout.promote()
        feed(rollout, 50, candidate=True, failed=True)
        rollout.rollback()
        assert (rollout.promote().share, rollout.watch.seen[True]) == (0.05, 0)

    def test_what_makes_no_sense_is_refused(self) -> None:
        rollout = Rollout(PLAN)
        for order in (rollout.pause, rollout.promote):
            with pytest.raises(Refused):
                order()


class TestGuards:
    def test_a_candidate_that_fails_is_rolled_back_even_while_paused(self) -> None:
        rollout = running()
        rollout.pause()
        for second in range(10, 200, 10):
            feed(rollout, 20, candidate=True, failed=True)
            feed(rollout, 380, candidate=False)
            if rollout.tick(float(second), available=True) is not None:
                break
        assert (rollout.state, rollout.share) == (State.ROLLED_BACK, 0.0)
        assert rollout.reason.startswith("errors: error rate 100.00%, baseline 0.00%")
        assert second <= 50, "an outright failure is seen within two hundred requests"

    def test_an_incident_that_hits_both_is_no_difference(self) -> None:
        rollout = running()
        for second in range(10, 600, 10):
            bad = 100 <= second < 200
            feed(rollout, 10, candidate=True, failed=bad)
            feed(rollout, 190, candidate=False, failed=bad)
            rollout.tick(float(second), available=True)
        assert rollout.state is State.RUNNING

    def test_scores_are_compared_when_asked_for(self) -> None:
        rollout = running(Plan("llama", "v1", "v2", STEPS, Guards(quality=0.05, min_samples=10)))
        for second in range(10, 400, 10):
            for number in range(10):
                rollout.watch.score(candidate=True, value=0.6 + number / 100)
                rollout.watch.score(candidate=False, value=0.8 + number / 100)
            rollout.tick(float(second), available=True)
        assert rollout.reason.startswith("quality")


class TestSplit:
    @given(st.text(max_size=20), st.floats(0, 1), st.floats(0, 1))
    def test_a_growing_share_moves_clients_one_way_only(self, key: str, one: float, other: float) -> None:
        low, high = sorted((one, other))
        if version_at(PLAN, low, key) == "v2":
            assert version_at(PLAN, high, key) == "v2"

    def test_the_share_is_the_share(self) -> None:
        got = sum(version_at(PLAN, 0.25, f"client-{number}") == "v2" for number in range(20_000))
        assert 0.24 < got / 20_000 < 0.26

    def test_nothing_and_everything_are_exact(self) -> None:
        keys = [f"client-{number}" for number in range(1000)]
        assert {version_at(PLAN, 0.0, key) for key in keys} == {"v1"}
        assert {version_at(PLAN, 1.0, key) for key in keys} == {"v2"}

    def test_another_release_begins_with_other_clients(self) -> None:
        other = Plan("llama", "v2", "v3", STEPS)
        keys = [f"client-{number}" for number in range(1000)]
        first = {key for key in keys if version_at(PLAN, 0.1, key) == "v2"}
        second = {key for key in keys if version_at(other, 0.1, key) == "v3"}
        assert len(first & second) < 30


def releases(*plans: Plan) -> tuple[Releases, list[Event]]:
    events: list[Event] = []
    built = Releases(lambda pool, version: version in ("v1", "v2"), events.append)
    built.install(plans)
    return built, events


class TestReleases:
    def test_testers_choose_their_version_in_any_state(self) -> None:
        plan = Plan("llama", "v1", "v2", STEPS, pin_header="x-release")
        book, _ = releases(plan)
        assert book.version_for("llama", "k", {"x-release": "v2"}) == ("v2", "")
        assert book.version_for("llama", "k", {"x-release": "no-such"}) == ("v1", "v1")
        assert book.version_for("other", "k", {}) is None

    def test_a_reload_with_the_same_plan_goes_on_and_another_begins_anew(self) -> None:
        book, _ = releases(PLAN)
        book.tick(0.0)
        book.order("llama", "promote")
        book.rollout("llama").watch.request(candidate=True, failed=False, ttft_s=None)
        book.order("llama", "rollback")
        book.order("llama", "promote")
        book.install([Plan("llama", "v1", "v2", STEPS, Guards(errors=0.5))])
        assert book.rollout("llama").samples == 0
        assert (book.rollout("llama").share, book.rollout("llama").watch.guards.errors) == (0.05, 0.5)
        book.install([Plan("llama", "v1", "v3", STEPS)])
        assert book.rollout("llama").share == 0.0

    def test_a_restart_goes_on_where_it_was(self) -> None:
        book, _ = releases(PLAN)
        book.tick(0.0)
        book.order("llama", "promote")
        book.rollout("llama").watch.request(candidate=True, failed=False, ttft_s=None)
        saved = json.loads(json.dumps(book.dump()))
        after, _ = releases()
        after.load(saved)
        after.install([PLAN])
        rollout = after.rollout("llama")
        assert (rollout.state, rollout.share, rollout.samples) == (State.RUNNING, 0.25, 1)

    @pytest.mark.parametrize("saved", [{"llama": 1}, {"llama": {"identity": PLAN.identity}}, {"x": []}])
    def test_a_file_of_rubbish_begins_anew(self, saved: dict[str, object]) -> None:
        book, _ = releases()
        book.load(saved)
        book.install([PLAN])
        assert book.rollout("llama").state is State.WAITING

    def test_orders_for_what_is_not_there_are_refused_by_name(self) -> None:
        book, _ = releases(PLAN)
        with pytest.raises(Refused, match="pools with one: llama"):
            book.order("lama", "pause")
        with pytest.raises(Refused, match="v1 and v2"):
            book.score("llama", "v9", 1.0)


class TestInTheCore:
    """Requests get their version, and their endings are counted for it."""

    ONE, TWO = spec("one", version="v1"), spec("two", version="v2", port=8001)

    def test_a_session_stays_with_its_version(self) -> None:
        built = core([self.ONE, self.TWO])
        built.releases.install([Plan("llama", "v1", "v2", (Step(0.5, 10),))])
        built.releases.tick(0.0)
        seen: dict[str, set[str]] = {}
        for number in range(60):
            session = f"s{number % 20}"
            decision = built.dispatcher.decide(request(f"r{number}", session=session), 0.0)
            seen.setdefault(session, set()).add(decision.lease.version)  # type: ignore[union-attr]
            assert decision.lease.arm == decision.lease.version  # type: ignore[union-attr]
        assert all(len(versions) == 1 for versions in seen.values())
        assert set.union(*seen.values()) == {"v1", "v2"}

    def test_endings_are_counted_and_neutral_ones_are_not(self) -> None:
        built = core([self.ONE, self.TWO])
        built.releases.install([PLAN])
        for number, status in enumerate((200, 500, 404)):
            built.dispatcher.decide(request(f"r{number}"), 0.0)
            built.take(end(f"r{number}", self.ONE, status), 1.0)
        watch = built.releases.rollout("llama").watch
        watch.request(candidate=True, failed=False, ttft_s=None)
        watch.errors.close()
        assert (watch.seen[False], watch.errors.baseline.mean) == (2, 0.5)

    def test_a_failure_hidden_by_a_retry_counts(self) -> None:
        built = core([self.ONE, spec("one-b", version="v1", port=8002), self.TWO])
        built.releases.install([PLAN])
        decision = built.dispatcher.decide(request("r"), 0.0)
        lease = decision.lease  # type: ignore[union-attr]
        lease.blamed = lease.endpoint
        built.take(End("r", lease.endpoint.spec.cluster, lease.endpoint.spec.address, 200), 1.0)
        watch = built.releases.rollout("llama").watch
        watch.request(candidate=True, failed=False, ttft_s=None)
        watch.errors.close()
        assert watch.errors.baseline.mean == 1.0

    def test_a_failing_candidate_does_not_close_the_pool(self) -> None:
        built = core([self.ONE, self.TWO])
        built.releases.install([Plan("llama", "v1", "v2", (Step(0.5, 10),))])
        built.releases.tick(0.0)
        for number in range(400):
            decision = built.dispatcher.decide(request(f"r{number}"), 0.0)
            lease = decision.lease  # type: ignore[union-attr]
            bad = lease.version == "v2"
            built.take(end(lease.id, self.TWO if bad else self.ONE, 500 if bad else 200), 1.0)
        circuit = built.admission.circuits.get("llama")
        assert circuit is None or not circuit.is_open(1.0)

    def test_weights_of_routes_hold_where_no_release_rules(self) -> None:
        built = core([self.ONE, self.TWO])
        built.install(Router({"llama": Pool("llama", models=("llama-3",))}), [self.ONE, self.TWO])
        decision = built.dispatcher.decide(request("r"), 0.0)
        assert decision.lease.arm == ""  # type: ignore[union-attr]


class TestSettings:
    def test_steps_are_written_as_people_say_them(self) -> None:
        said = ReleaseSettings.model_validate(
            {"baseline": "v1", "candidate": "v2", "steps": "5 % 5m, 25% 10m, 50 % 30m, 100 %"}
        )
        assert [(step.percent, step.hold) for step in said.steps] == [
            (5, 300),
            (25, 600),
            (50, 1800),
            (100, 0),
        ]
        as_list = {"baseline": "v1", "candidate": "v2", "steps": ["100 %"]}
        assert ReleaseSettings.model_validate(as_list).steps[0].percent == 100

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"steps": "50 %, 25 %"}, "must grow"),
            ({"steps": "half"}, "is no step"),
            ({"steps": ""}, "is no step"),
            ({"candidate": "v1"}, "name two versions"),
            ({"pin_header": "x-gateway-release"}, "gateway's own"),
        ],
    )
    def test_what_cannot_work_is_said(self, change: dict[str, str], text: str) -> None:
        with pytest.raises(ValidationError, match=text):
            ReleaseSettings.model_validate(
                {"baseline": "v1", "candidate": "v2", "steps": "5 % 5m, 100 %", **change}
            )
