"""What the dashboard shows: rows of graphs, each a title, a unit, a sentence and its queries.

Rules of this file: every query of a metric with a `pool` label obeys the dashboard's choice of pools; a rate is taken over
`$__rate_interval`; what is not known has no line, and no query turns that into a zero.
"""

from __future__ import annotations

from dataclasses import dataclass

POOL = 'pool=~"$pool"'
RATE = "$__rate_interval"


@dataclass(slots=True, frozen=True)
class Graph:
    """One panel. ``queries`` are (PromQL, legend); ``unit`` is Grafana's name of it."""

    title: str
    unit: str
    text: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


@dataclass(slots=True, frozen=True)
class Row:
    """Graphs that belong together, three beside each other."""

    title: str
    graphs: tuple[Graph, ...]


def _rate(metric: str, by: str, labels: str = POOL) -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{RATE}]))"


def _share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _quantile(quantile: float, metric: str, by: str = "", labels: str = POOL) -> str:
    return (
        f"histogram_quantile({quantile}, sum by (le{', ' if by else ''}{by}) "
        f"(rate({metric}_bucket{{{labels}}}[{RATE}])))"
    )


def _endpoint(metric: str) -> tuple[tuple[str, str], ...]:
    return ((f"extproc_endpoint_{metric}{{{POOL}}}", "{{endpoint}}"),)


TRAFFIC = Row(
    "Traffic and errors",
    (
        Graph(
            "Requests by status",
            "reqps",
            "Requests that ended. Code 0: Envoy never reported the end.",
            ((_rate("extproc_requests_total", "code"), "{{code}}"),),
            stacked=True,
        ),
        Graph(
            "Requests that did not end well, by reason",
            "reqps",
            "Everything but `ok`: what engines did (server_error, reset, timeout …), what clients did (client_gone, "
            "client_error), what the gateway refused.",
            ((_rate("extproc_requests_total", "reason", f'{POOL}, reason!="ok"'), "{{reason}}"),),
            stacked=True,
        ),
        Graph(
            "Share of answers 5xx or never reported",
            "percentunit",
            "By pool.",
            (
                (
                    _share(
                        _rate("extproc_requests_total", "pool", f'{POOL}, code=~"5..|0"'),
                        _rate("extproc_requests_total", "pool"),
                    ),
                    "{{pool}}",
                ),
            ),
        ),
        Graph(
            "Tokens",
            "short",
            "Tokens per second as engines reported them; cached is part of input.",
            ((_rate("extproc_tokens_total", "kind"), "{{kind}}"),),
        ),
        Graph(
            "Failed attempts by reason",
            "short",
            "Attempts per second; a request that was retried with success shows up here only.",
            ((_rate("extproc_attempts_failed_total", "reason", ""), "{{reason}}"),),
        ),
        Graph(
            "Retries of busy answers",
            "reqps",
            "Sent again after a 503, and requests sent out without leave for it: the retry budget was spent.",
            (
                (_rate("extproc_retries_busy_total", "pool"), "{{pool}} retried"),
                (_rate("extproc_retries_withheld_total", "pool"), "{{pool}} withheld"),
            ),
        ),
    ),
)

LATENCY = Row(
    "Time to the first token, and where time goes",
    (
        Graph(
            "TTFT",
            "s",
            "Streamed requests: from the first byte sent to an engine to its first body byte.",
            tuple((_quantile(q, "extproc_ttft_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)),
        ),
        Graph(
            "TTFT p99 by model",
            "s",
            "The same, one line a model.",
            ((_quantile(0.99, "extproc_ttft_seconds", "model"), "{{model}}"),),
        ),
        Graph(
            "Where a request's time went, mean",
            "s",
            "Waiting: before it was sent, with our queue. Engine: its first to its last byte. Proxying: the rest.",
            (
                (
                    _share(
                        _rate("extproc_request_duration_seconds_sum", "part"),
                        _rate("extproc_request_duration_seconds_count", "part"),
                    ),
                    "{{part}}",
                ),
            ),
            stacked=True,
        ),
        Graph(
            "Waiting before a request was sent",
            "s",
            "Reading, queue, decision, connection.",
            tuple(
                (
                    _quantile(q, "extproc_request_duration_seconds", "", f'{POOL}, part="waiting"'),
                    f"p{q * 100:g}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Graph(
            "Mean TTFT by endpoint",
            "s",
            "Streamed requests of the last minute.",
            _endpoint("ttft_seconds"),
        ),
        Graph(
            "Our own code per decision",
            "s",
            "Time between the request read and the endpoint chosen.",
            tuple((_quantile(q, "extproc_decision_seconds", "", ""), f"p{q * 100:g}") for q in (0.5, 0.99)),
        ),
    ),
)

ENDPOINTS = Row(
    "Endpoints",
    (
        Graph("Leases", "short", "Requests decided for the endpoint and not yet ended.", _endpoint("leases")),
        Graph(
            "Backlog",
            "s",
            "Time to prefill what was given to the endpoint and is not yet prefilled.",
            _endpoint("backlog_seconds"),
        ),
        Graph(
            "Waiting in the engine",
            "short",
            "Requests waiting, as the engine says.",
            _endpoint("engine_waiting"),
        ),
        Graph(
            "KV cache in use",
            "percentunit",
            "The fullest rank, as the engine says.",
            _endpoint("engine_kv_usage"),
        ),
        Graph(
            "Learned prefill rate",
            "short",
            "Prompt tokens per second.",
            _endpoint("prefill_tokens_per_second"),
        ),
        Graph("Left out by health", "short", "1 while health keeps requests away.", _endpoint("excluded")),
        Graph(
            "Decisions",
            "reqps",
            "By endpoint.",
            ((_rate("extproc_decisions_total", "endpoint", ""), "{{endpoint}}"),),
            stacked=True,
        ),
        Graph(
            "Age of the newest good scrape",
            "s",
            "What is older counts less.",
            _endpoint("scrape_age_seconds"),
        ),
        Graph(
            "Metrics that engines lack",
            "short",
            "Values that the engine's page should have and has not.",
            ((f"extproc_metric_missing{{{POOL}}}", "{{endpoint}} {{value}}"),),
        ),
    ),
)

CACHE = Row(
    "Prefix cache",
    (
        Graph(
            "Hit share of prompt tokens",
            "percentunit",
            "Cached tokens of all input tokens, as usage reports say. No line: engines do not report them.",
            (
                (
                    _share(
                        _rate("extproc_tokens_total", "pool", f'{POOL}, kind="cached"'),
                        _rate("extproc_tokens_total", "pool", f'{POOL}, kind="input"'),
                    ),
                    "{{pool}}",
                ),
            ),
        ),
        Graph(
            "Hit share by endpoint since its start",
            "percentunit",
            "As the engine's own counters say.",
            _endpoint("engine_hit_share"),
        ),
        Graph(
            "Why the endpoint was chosen",
            "reqps",
            "prefix: it holds the longest part of the prompt. spill: another holds more, but waiting there costs more. "
            "load: nobody holds anything.",
            ((_rate("extproc_decisions_total", "reason", ""), "{{reason}}"),),
            stacked=True,
        ),
        Graph(
            "Bounded maps, filled",
            "percentunit",
            "At 1 the oldest entries are forgotten.",
            (("extproc_cache_entries / extproc_cache_cap", "{{cache}}"),),
        ),
        Graph(
            "KV events",
            "short",
            "Messages per second, gaps, and events not taken by why.",
            (
                (f"rate(extproc_kv_events_messages_total[{RATE}])", "messages"),
                (f"rate(extproc_kv_events_gaps_total[{RATE}])", "gaps"),
                (_rate("extproc_kv_events_odd_total", "why", ""), "not taken: {{why}}"),
            ),
        ),
        Graph(
            "Engine ranks by what is known of their cache",
            "short",
            "live: KV events tell all; partial: the approximate index helps out.",
            (("extproc_kv_events_ranks", "{{state}}"),),
            stacked=True,
        ),
    ),
)

QUEUE = Row(
    "Queue and limits",
    (
        Graph(
            "Waiting requests",
            "short",
            "By pool and priority.",
            (
                (
                    f"sum by (pool, priority) (extproc_queue_requests{{{POOL}}})",
                    "{{pool}} priority {{priority}}",
                ),
            ),
            stacked=True,
        ),
        Graph(
            "Mean wait of those that had to",
            "s",
            "Requests dispatched from the queue in this time.",
            (
                (
                    _share(
                        _rate("extproc_queue_wait_seconds_total", "pool"),
                        _rate("extproc_queue_dispatched_total", "pool"),
                    ),
                    "{{pool}}",
                ),
            ),
        ),
        Graph(
            "Left the queue unserved",
            "reqps",
            "client: it went. timeout: its deadline passed. shed: it could not have started in time.",
            ((_rate("extproc_queue_left_total", "how", ""), "{{how}}"),),
            stacked=True,
        ),
        Graph(
            "Waiting requests by tenant",
            "short",
            "Who fills the queue.",
            ((f"sum by (tenant) (extproc_queue_tenant_requests{{{POOL}}})", "{{tenant}}"),),
            stacked=True,
        ),
        Graph(
            "Refused by a limit",
            "reqps",
            "By the scope of the limit and what it counts.",
            ((_rate("extproc_limit_refusals_total", "scope, kind", ""), "{{scope}} {{kind}}"),),
            stacked=True,
        ),
        Graph(
            "Tokens by tenant",
            "short",
            "Tokens per second settled under a limit.",
            ((_rate("extproc_tenant_tokens_total", "tenant", ""), "{{tenant}}"),),
            stacked=True,
        ),
        Graph(
            "Refused for want of capacity, by reason",
            "reqps",
            "429 and 503, engines' own busy answers included.",
            ((_rate("extproc_requests_total", "reason", f'{POOL}, code=~"429|503"'), "{{reason}}"),),
            stacked=True,
        ),
        Graph(
            "Answered by a fallback pool",
            "reqps",
            "From which pool, to which, why.",
            ((_rate("extproc_fallbacks_total", "pool, to, why"), "{{pool}} to {{to}}: {{why}}"),),
        ),
        Graph(
            "Requests being read, decided or queued",
            "short",
            "ext_proc streams open now.",
            (("extproc_streams_in_flight", "{{instance}}"),),
        ),
    ),
)

HEALTH = Row(
    "Health",
    (
        Graph("Circuits", "short", "0 closed, 1 half-open (on trial), 2 open.", _endpoint("circuit")),
        Graph(
            "Circuits of whole pools",
            "short",
            "1 while requests of the pool are refused at once, because its engines failed together.",
            ((f"extproc_circuit_open{{{POOL}}}", "{{pool}}"),),
        ),
        Graph("Failures in the circuit's window", "percentunit", "By endpoint.", _endpoint("error_share")),
        Graph(
            "Successes of the last minute",
            "percentunit",
            "A node loses weight before health takes it out.",
            _endpoint("success_share"),
        ),
        Graph("Resting because busy", "short", "1 while the endpoint rests.", _endpoint("busy")),
        Graph("Ready", "short", "0 while it drains or warms up.", _endpoint("ready")),
        Graph(
            "Stream guard",
            "short",
            "What it did per second, on routes that ask for it.",
            ((_rate("extproc_guard_events_total", "event", ""), "{{event}}"),),
        ),
    ),
)

RELEASES = Row(
    "Releases and shadow traffic",
    (
        Graph(
            "Share of the candidate",
            "percentunit",
            "Of the clients of a pool with a release.",
            ((f"extproc_release_share{{{POOL}}}", "{{pool}} {{candidate}} {{state}}"),),
        ),
        Graph(
            "What happened",
            "short",
            "Events of the last five minutes, and whether plan, guard or operator made them.",
            (
                (
                    f"sum by (pool, event, by) (increase(extproc_release_events_total{{{POOL}}}[5m]))",
                    "{{pool}} {{event}} by {{by}}",
                ),
            ),
        ),
        Graph(
            "Shadow traffic",
            "reqps",
            "Requests copied, compared, lost, or not copied for want of a place.",
            ((_rate("extproc_shadow_requests_total", "pool, what"), "{{pool}} {{what}}"),),
        ),
    ),
)

GATEWAY = Row(
    "The gateway itself",
    (
        Graph(
            "Event loop, worst delay",
            "s",
            "Above 0.05 s extproc is short of CPU, or something holds its loop.",
            (("extproc_loop_lag_worst_seconds", "{{instance}}"),),
        ),
        Graph(
            "CPU",
            "percentunit",
            "Of one core: extproc is one process.",
            ((f"rate(extproc_process_cpu_seconds_total[{RATE}])", "{{instance}}"),),
        ),
        Graph(
            "Memory",
            "bytes",
            "Resident, and request bodies held.",
            (
                ("extproc_process_resident_memory_bytes", "{{instance}} resident"),
                ("extproc_buffered_bytes", "{{instance}} bodies"),
            ),
        ),
        Graph(
            "Streams of Envoy",
            "short",
            "Access log streams: 0 means that extproc hears nothing of what became of requests.",
            (
                ("extproc_log_streams", "{{instance}} access log"),
                ("extproc_guard_streams_open", "{{instance}} guarded"),
            ),
        ),
        Graph(
            "Records lost or odd",
            "short",
            "Per second. unknown: never decided here. dead: the end was never reported.",
            (
                (_rate("extproc_records_odd_total", "why", ""), "{{why}}"),
                (_rate("extproc_leases_ended_total", "how", ""), "leases {{how}}"),
                (f"rate(extproc_decision_log_dropped_total[{RATE}])", "decision log dropped"),
            ),
        ),
        Graph(
            "Configuration",
            "short",
            "Changes of the files; rejected ones leave the old state in use.",
            (("sum by (result) (increase(extproc_config_reloads_total[5m]))", "{{result}}"),),
        ),
    ),
)

ROWS = (TRAFFIC, LATENCY, ENDPOINTS, CACHE, QUEUE, HEALTH, RELEASES, GATEWAY)
