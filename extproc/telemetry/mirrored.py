"""Numbers that other parts keep anyway (running totals, sizes of maps), shown as metrics when the page is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Reading = float | Mapping[tuple[str, ...], float]


@dataclass(slots=True, frozen=True)
class Mirrored:
    """One metric whose value lives elsewhere. Counters are named without ``_total``."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()


MIRRORED = (
    Mirrored(
        "streams_in_flight", "gauge", "ext_proc streams open now: requests being read, decided or queued."
    ),
    Mirrored("streams", "counter", "ext_proc streams."),
    Mirrored("messages", "counter", "ext_proc messages read from Envoy."),
    Mirrored("streams_cancelled", "counter", "ext_proc streams whose client left before the answer."),
    Mirrored("streams_failed", "counter", "ext_proc streams that ended in an error of ours."),
    Mirrored(
        "requests_brief", "counter", "Requests routed without reading their prompt: the event loop was late."
    ),
    Mirrored(
        "release_share",
        "gauge",
        "Share of the clients that get the candidate of a release, 0 to 1.",
        ("pool", "candidate", "state"),
    ),
    Mirrored(
        "release_events",
        "counter",
        "What happened to releases: started, step, paused, resumed, completed, rolled_back; by plan, guard, operator.",
        ("pool", "event", "by"),
    ),
    Mirrored(
        "shadow_requests",
        "counter",
        "Shadow traffic of a pool: copied, compared, lost, or not copied for want of concurrent, rpm.",
        ("pool", "what"),
    ),
    Mirrored("guard_streams_open", "gauge", "Streams that the stream guard watches now."),
    Mirrored("guard_streams", "counter", "Streams that the stream guard watched."),
    Mirrored("guard_chunks", "counter", "Chunks of replies that passed the stream guard."),
    Mirrored(
        "guard_events",
        "counter",
        "What the stream guard did: first_token_timeout, heartbeat, idle, total.",
        ("event",),
    ),
    Mirrored("buffered_bytes", "gauge", "Request body bytes held while deciding."),
    Mirrored("leases", "gauge", "Open leases of all endpoints."),
    Mirrored("leases_ended", "counter", "Leases that ended without a final record, by how.", ("how",)),
    Mirrored("leases_moved", "counter", "Leases that followed Envoy to another endpoint."),
    Mirrored("leases_adopted", "counter", "Running requests of an earlier extproc that were taken over."),
    Mirrored("records", "counter", "Access log records read."),
    Mirrored(
        "records_odd",
        "counter",
        "Access log records of no use, by why: unknown id, late, unreadable.",
        ("why",),
    ),
    Mirrored(
        "log_streams",
        "gauge",
        "Access log streams open: 0 means that extproc hears nothing of what became of requests.",
    ),
    Mirrored("log_streams_broken", "counter", "Access log streams that ended with an error."),
    Mirrored("retries_busy", "counter", "Requests sent again after a busy answer (503).", ("pool",)),
    Mirrored(
        "retries_withheld",
        "counter",
        "Requests sent out without leave to be retried on a busy answer: the retry budget was spent.",
        ("pool",),
    ),
    Mirrored("attempts_failed", "counter", "Failed attempts.", ("endpoint", "reason")),
    Mirrored(
        "kv_events_ranks",
        "gauge",
        "Engine ranks that publish KV events, by what is known of them: waiting, replaying, live, partial.",
        ("state",),
    ),
    Mirrored(
        "kv_events_exact",
        "gauge",
        "1 where KV events tell all that the endpoint holds; 0 where the approximate index helps out.",
        ("endpoint",),
    ),
    Mirrored("kv_events_messages", "counter", "KV event messages received, replays apart."),
    Mirrored("kv_events_blocks", "counter", "Blocks that KV events told of, by what happened.", ("what",)),
    Mirrored(
        "kv_events_odd",
        "counter",
        "KV events not taken: unreadable or undecodable (alarm: an engine speaks an unknown dialect), unknown "
        "(event types), and blocks: orphan, skipped (other attention kinds, sizes, media), no_room.",
        ("why",),
    ),
    Mirrored(
        "tokenizer_requests",
        "counter",
        "Requests of pools with a tokenizer: tokens, late (not in time), busy, not_followed (media and other bodies that "
        "are not tokenised here), refused (by the chat template), failed.",
        ("result",),
    ),
    Mirrored(
        "tokenizer_broken",
        "gauge",
        "1 for pools whose tokenizer gave other tokens in pieces than as a whole, and now works without its memory.",
        ("pool",),
    ),
    Mirrored("adapters_known", "gauge", "LoRA adapters that engines told of."),
    Mirrored("kv_events_gaps", "counter", "Messages found missing."),
    Mirrored("kv_events_restarts", "counter", "Engine restarts seen in KV events or metrics."),
    Mirrored("kv_events_replays", "counter", "Replays asked of engines, and those that failed.", ("what",)),
    Mirrored(
        "kv_events_behind_seconds",
        "gauge",
        "How long KV events have been waiting to be read without a pause.",
    ),
    Mirrored("queue_requests", "gauge", "Requests that wait.", ("pool", "priority")),
    Mirrored("queue_tenant_requests", "gauge", "Requests that wait, by tenant.", ("pool", "tenant")),
    Mirrored("queue_bytes", "gauge", "Body bytes of requests that wait.", ("pool",)),
    Mirrored("queued", "counter", "Requests that had to wait."),
    Mirrored(
        "queue_left", "counter", "Requests that left a queue unserved: client, timeout, shed.", ("how",)
    ),
    Mirrored("queue_dispatched", "counter", "Requests dispatched after waiting.", ("pool",)),
    Mirrored("queue_wait_seconds", "counter", "Time that dispatched requests had waited.", ("pool",)),
    Mirrored(
        "fallbacks",
        "counter",
        "Requests that a fallback pool answered: saturated, circuit, unavailable, queue_timeout.",
        ("pool", "to", "why"),
    ),
    Mirrored("circuit_open", "gauge", "1 while a pool's circuit is open.", ("pool",)),
    Mirrored(
        "limit_refusals",
        "counter",
        "Requests refused by a limit: of which scope, and of what (requests, tokens, day).",
        ("scope", "kind"),
    ),
    Mirrored("tenant_refused", "counter", "Requests refused, by tenant.", ("tenant", "reason")),
    Mirrored("tenant_tokens", "counter", "Tokens settled under a limit, by tenant.", ("tenant",)),
    Mirrored("cache_entries", "gauge", "Entries of a bounded map.", ("cache",)),
    Mirrored("cache_cap", "gauge", "Most entries of a bounded map.", ("cache",)),
    Mirrored(
        "trace_spans",
        "counter",
        "Spans of traces by what became of them: exported, failed (the collector did not take them), dropped.",
        ("result",),
    ),
    Mirrored(
        "decision_log_dropped", "counter", "Decision records not written because the disk was too slow."
    ),
)


class MirroredSeries(Collector):
    """``bind`` a reader to each name; a name without a reader has no series."""

    def __init__(self) -> None:
        self._readers: dict[str, Callable[[], Reading]] = {}

    def bind(self, name: str, read: Callable[[], Reading]) -> None:
        """``read`` is called on the thread that writes the page and must only read. KeyError for an unknown
        name.
        """
        if not any(mirrored.name == name for mirrored in MIRRORED):
            raise KeyError(name)
        self._readers[name] = read

    def collect(self) -> Iterator[Metric]:
        """All bound numbers at this moment."""
        for mirrored in MIRRORED:
            family = _FAMILIES[mirrored.kind](
                f"extproc_{mirrored.name}", mirrored.text, labels=mirrored.labels
            )
            read = self._readers.get(mirrored.name)
            if read is not None:
                reading = read()
                rows = dict(reading) if isinstance(reading, Mapping) else {(): reading}
                for labels, value in rows.items():
                    family.add_metric(labels, float(value))
            yield family


_FAMILIES: Mapping[str, type[GaugeMetricFamily] | type[CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}
