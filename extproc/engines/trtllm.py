"""TensorRT-LLM's own server, ``trtllm-serve``.

Its Prometheus page is at ``/prometheus/metrics`` (``/metrics`` is JSON) and only complete with
``return_perf_metrics`` and ``enable_iter_perf_stats``: without them the gauges are absent, hence unknown.
Hits are counted in blocks. Unknowable: adapters, sleep state.
"""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.scan import Page, Scanner
from extproc.engines.state import EngineState

_SCANNER = Scanner(
    [
        "trtllm_num_requests_running",
        "trtllm_num_requests_waiting",
        "trtllm_kv_cache_utilization",
        "trtllm_kv_cache_max_blocks",
        "trtllm_kv_cache_tokens_per_block",
        "trtllm_kv_cache_reused_blocks_total",
        "trtllm_kv_cache_missed_blocks_total",
        "trtllm_prompt_tokens_total",
        "trtllm_prompt_cached_tokens_total",
        "trtllm_generation_tokens_total",
        "trtllm_time_to_first_token_seconds_count",
        "trtllm_request_success_total",
        "process_start_time_seconds",
    ]
)


def read(text: str, at: float) -> EngineState:
    """State from a page of trtllm-serve."""
    page = _SCANNER.scan(text)
    prompt, cached = page.total("trtllm_prompt_tokens_total"), page.total("trtllm_prompt_cached_tokens_total")
    reused, missed = (
        page.total("trtllm_kv_cache_reused_blocks_total"),
        page.total("trtllm_kv_cache_missed_blocks_total"),
    )
    return EngineState(
        at=at,
        running=page.total("trtllm_num_requests_running"),
        waiting=page.total("trtllm_num_requests_waiting"),
        kv_usage=page.share("trtllm_kv_cache_utilization"),
        kv_blocks=_whole(page, "trtllm_kv_cache_max_blocks"),
        block_size=_whole(page, "trtllm_kv_cache_tokens_per_block"),
        prompt_tokens_total=prompt,
        computed_prompt_tokens_total=None if prompt is None or cached is None else max(prompt - cached, 0.0),
        first_tokens_total=page.total("trtllm_time_to_first_token_seconds_count"),
        generation_tokens_total=page.total("trtllm_generation_tokens_total"),
        requests_done_total=page.total("trtllm_request_success_total"),
        prefix_queries_total=None if reused is None or missed is None else reused + missed,
        prefix_hits_total=None if missed is None else reused,
        started_at=page.highest("process_start_time_seconds"),
    )


def _whole(page: Page, name: str) -> int | None:
    value = page.highest(name)
    return int(value) if value else None


TRTLLM = Engine(
    "trtllm",
    read,
    tells=frozenset({"running", "waiting", "kv_usage"}),
    metrics_path="/prometheus/metrics",
    health_path="/health",
)
