"""The metrics: what they count, that clients cannot multiply them, that they vanish with their endpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.api.request import Api
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.fleet import Fleet
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.view import CacheView
from extproc.ledger import Lease, Ledger, Settlement
from extproc.outcome import End, FailedAttempt, Outcome, Usage
from extproc.scheduling.strategy import Choice
from extproc.telemetry.bindings import bind_feedback, bind_streams
from extproc.telemetry.family import CappedLabel
from extproc.telemetry.metrics import Metrics, catalogue, catalogue_table

KEY = "c/10.0.0.1:8000"


def fleet(*addresses: str) -> Fleet:
    made = Fleet()
    made.apply([EndpointSpec("c", address, "chat") for address in addresses or ("10.0.0.1:8000",)])
    return made


class Page:
    """A page asked for at ``now``, by sample name and labels."""

    def __init__(self, metrics: Metrics) -> None:
        metrics.sweep()
        self.text = metrics.page().decode()
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, tuple(sorted(labels.items()))))


def metrics_of(made: Fleet, now: float = 100.0, **options: int) -> Metrics:
    return Metrics(made.endpoints, lambda: now, process=False, **options)


def settlement(
    endpoint: Endpoint, model: str = "m", end: End | None = None, reason: str = "ok"
) -> Settlement:
    lease = Lease("r", endpoint, 0.0, pool="chat", model=model, api=Api.CHAT, stream=True)
    return Settlement(lease, Outcome.SUCCESS, reason, end)


def ending(usage: Usage | None = None) -> End:
    return End("r", "c", "10.0.0.1:8000", 200, "", (), 0.3, 1.0, 0.25, 1.375, 10, 1, usage)


def test_a_settled_request_is_counted_with_its_times_and_tokens() -> None:
    made = fleet()
    metrics = metrics_of(made)
    metrics.settled(settlement(made.endpoints[KEY], end=ending(Usage(500, 20, 400))))
    page = Page(metrics)
    assert page.value("extproc_requests_total", pool="chat", model="m", code="200", reason="ok") == 1
    assert page.value("extproc_ttft_seconds_sum", pool="chat", model="m") == 0.3
    assert page.value("extproc_request_duration_seconds_sum", pool="chat", part="waiting") == 0.25
    assert page.value("extproc_request_duration_seconds_sum", pool="chat", part="engine") == 1.0
    assert page.value("extproc_request_duration_seconds_sum", pool="chat", part="proxying") == 0.125
    assert page.value("extproc_tokens_total", pool="chat", model="m", kind="cached") == 400


def test_absent_usage_is_counted_as_absent_not_as_zero_tokens() -> None:
    made = fleet()
    metrics = metrics_of(made)
    metrics.settled(settlement(made.endpoints[KEY], end=ending()))
    page = Page(metrics)
    assert page.value("extproc_requests_without_usage_total", pool="chat", model="m") == 1
    assert page.value("extproc_tokens_total", pool="chat", model="m", kind="input") is None


def test_a_request_without_a_final_record_has_code_zero() -> None:
    made = fleet()
    metrics = metrics_of(made)
    metrics.settled(settlement(made.endpoints[KEY], reason="dead"))
    assert Page(metrics).value("extproc_requests_total", pool="chat", model="m", code="0", reason="dead") == 1


def test_decisions_are_counted_by_endpoint_and_why() -> None:
    made = fleet("10.0.0.1:8000", "10.0.0.2:8000")
    metrics = metrics_of(made)
    first, second = made.endpoints.values()
    metrics.decided(
        [Choice(second, matched_tokens=0), Choice(first, matched_tokens=64)], "expected-latency", 0.0001
    )
    page = Page(metrics)
    labels = {"endpoint": second.key, "strategy": "expected-latency", "reason": "spill"}
    assert page.value("extproc_decisions_total", **labels) == 1
    assert page.value("extproc_decision_seconds_count") == 1


def test_model_names_of_clients_are_capped() -> None:
    made = fleet()
    metrics = metrics_of(made, model_cap=3)
    metrics.models.know(frozenset({"ours"}))
    for number in range(50):
        metrics.refused("chat", f"m{number}", 404, "model_not_found")
    metrics.refused("chat", "ours", 429, "overloaded")
    page = Page(metrics)
    models = {dict(labels)["model"] for name, labels in page.samples if name == "extproc_requests_total"}
    assert models == {"m0", "m1", "m2", "other", "ours"}


def test_a_full_label_keeps_the_values_it_has() -> None:
    label = CappedLabel(2)
    assert [label.of(value) for value in "abcab"] == ["a", "b", "other", "a", "b"]


def test_series_of_a_removed_endpoint_vanish() -> None:
    made = fleet("10.0.0.1:8000", "10.0.0.2:8000")
    metrics = metrics_of(made)
    for endpoint in made.endpoints.values():
        metrics.scraped(endpoint.key, "ok")
        metrics.decided([Choice(endpoint)], "round-robin", 0.001)
    assert KEY in Page(metrics).text
    made.apply([EndpointSpec("c", "10.0.0.2:8000", "chat")])
    metrics.scraped(KEY, "timeout")
    text = Page(metrics).text
    assert KEY not in text
    assert "c/10.0.0.2:8000" in text


def test_a_returning_endpoint_starts_its_series_again() -> None:
    made = fleet()
    metrics = metrics_of(made)
    metrics.scraped(KEY, "ok")
    made.apply([])
    Page(metrics)
    made.apply([EndpointSpec("c", "10.0.0.1:8000", "chat")])
    metrics.scraped(KEY, "ok")
    assert Page(metrics).value("extproc_scrapes_total", endpoint=KEY, result="ok") == 1


def test_endpoint_gauges_mirror_the_fleet() -> None:
    made = fleet()
    endpoint = made.endpoints[KEY]
    endpoint.leases = 4
    endpoint.state = EngineState(
        at=97.5, running=3.0, kv_usage=0.5, prompt_tokens_total=100.0, computed_prompt_tokens_total=25.0
    )
    page = Page(metrics_of(made))
    assert page.value("extproc_endpoint_leases", endpoint=KEY, pool="chat") == 4
    assert page.value("extproc_endpoint_engine_running", endpoint=KEY, pool="chat") == 3
    assert page.value("extproc_endpoint_engine_kv_usage", endpoint=KEY, pool="chat") == 0.5
    assert page.value("extproc_endpoint_engine_hit_share", endpoint=KEY, pool="chat") == 0.75
    assert page.value("extproc_endpoint_scrape_age_seconds", endpoint=KEY, pool="chat") == 2.5


def test_what_an_engine_did_not_say_has_no_series_and_is_said_to_be_missing() -> None:
    made = fleet()
    made.endpoints[KEY].state = EngineState(at=99.0, running=3.0)
    page = Page(metrics_of(made))
    assert page.value("extproc_endpoint_engine_kv_usage", endpoint=KEY, pool="chat") is None
    assert page.value("extproc_metric_missing", endpoint=KEY, pool="chat", value="kv_usage") == 1
    assert page.value("extproc_metric_missing", endpoint=KEY, pool="chat", value="running") is None


def test_an_endpoint_never_scraped_has_no_engine_gauges() -> None:
    page = Page(metrics_of(fleet()))
    assert page.value("extproc_endpoint_scrape_age_seconds", endpoint=KEY, pool="chat") is None
    assert page.value("extproc_endpoint_leases", endpoint=KEY, pool="chat") == 0


@pytest.mark.parametrize(("ages", "stale"), [((0.5, 60.0), 0), ((60.0, 60.0), 1), ((None, None), 1)])
def test_a_pool_is_stale_when_nobody_in_it_was_scraped_lately(
    ages: tuple[float | None, ...], stale: int
) -> None:
    made = fleet("10.0.0.1:8000", "10.0.0.2:8000")
    for endpoint, age in zip(made.endpoints.values(), ages, strict=True):
        endpoint.state = None if age is None else EngineState(at=100.0 - age)
    assert Page(metrics_of(made)).value("extproc_pool_metrics_stale", pool="chat") == stale


class Streams:
    in_flight, buffered_bytes, total, messages, cancelled, failed, brief = 2, 4096, 10, 20, 1, 0, 0


class Log:
    streams, broken, records, unreadable = 1, 0, 30, 2


def test_running_totals_of_other_parts_are_shown() -> None:
    made = fleet()
    ledger = Ledger(made, CacheView(ApproximateIndex(), ModelStats()))
    metrics = metrics_of(made)
    bind_streams(metrics, Streams())
    bind_feedback(metrics, ledger, Log(), made.endpoints)
    ledger.ended(End("nobody", "c", "10.0.0.1:8000", 200), 1.0)
    ledger.attempt_failed(FailedAttempt("r", "c", "10.0.0.1:8000", 503, ("UF",)), 1.0)
    page = Page(metrics)
    assert page.value("extproc_streams_in_flight") == 2
    assert page.value("extproc_buffered_bytes") == 4096
    assert page.value("extproc_records_odd_total", why="unknown") == 1
    assert page.value("extproc_records_odd_total", why="unreadable") == 2
    assert page.value("extproc_attempts_failed_total", endpoint=KEY, reason="connect_failure") == 1
    made.apply([])
    assert (
        Page(metrics).value("extproc_attempts_failed_total", endpoint=KEY, reason="connect_failure") is None
    )


def test_bounded_maps_show_entries_and_cap() -> None:
    metrics = metrics_of(fleet())
    metrics.bind_caches({"prefix_blocks": (lambda: 7, lambda: 100)})
    page = Page(metrics)
    assert page.value("extproc_cache_entries", cache="prefix_blocks") == 7
    assert page.value("extproc_cache_cap", cache="prefix_blocks") == 100


def test_only_known_names_can_be_bound() -> None:
    with pytest.raises(KeyError):
        metrics_of(fleet()).bind("no_such_metric", lambda: 1)


def test_configuration_changes_are_counted() -> None:
    metrics = metrics_of(fleet())
    metrics.reloaded(1, applied=True)
    metrics.reloaded(1, applied=False)
    page = Page(metrics)
    assert page.value("extproc_config_generation") == 1
    assert page.value("extproc_config_reloads_total", result="rejected") == 1


def test_every_name_has_our_prefix_and_a_meaning() -> None:
    rows = catalogue(metrics_of(fleet()))
    assert len({name for name, *_ in rows}) == len(rows) > 40
    for name, _, _, text in rows:
        assert name.startswith("extproc_")
        assert text.endswith("."), name
        assert "|" not in text


def test_two_gateways_in_one_process_share_nothing() -> None:
    first, second = metrics_of(fleet()), metrics_of(fleet())
    first.refused("chat", "m", 404, "model_not_found")
    assert (
        Page(second).value(
            "extproc_requests_total", pool="chat", model="m", code="404", reason="model_not_found"
        )
        is None
    )


def test_the_documentation_lists_exactly_these_metrics() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    table = catalogue_table(metrics_of(fleet()))
    assert table in text, "docs/metrics.md is out of date; the table is:\n" + table


def test_any_interleaving_of_endpoints_leaves_only_living_series() -> None:
    rng = random.Random(4)
    made = fleet()
    metrics = metrics_of(made)
    for _ in range(60):
        made.apply([EndpointSpec("c", f"10.0.0.{n}:80", "chat") for n in range(8) if rng.random() < 0.5])
        for endpoint in list(made.endpoints.values()):
            metrics.scraped(endpoint.key, rng.choice(["ok", "timeout"]))
        metrics.scraped("c/10.0.0.99:80", "ok")
        page = Page(metrics)
        shown = {dict(labels)["endpoint"] for name, labels in page.samples if name == "extproc_scrapes_total"}
        assert shown <= set(made.endpoints)
