"""vLLM: metric names of 0.6 to 0.32.

Old and new names are both read, the new one first: KV usage and prefix-cache counters lost their ``gpu_``.
Data-parallel ranks are series with an ``engine`` label. Facts that are easy to get wrong:

- ``lora_requests_info`` carries the adapters in labels and the time of writing as its value; old label sets
  stay on the page, so the newest series is the only true one. It is absent when LoRA is off;
- ``prompt_tokens_total`` includes tokens found in the prefix cache;
  ``prompt_tokens_by_source_total{source="local_compute"}`` does not;
- ``generation_tokens_total`` is counted step by step, so it stands still only when the engine does;
- ``prefix_cache_queries_total`` counts a waiting request again at every scheduling step: a trend, not an
  account;
- ``engine_sleep_state`` has one series a state; the one that holds is 1.
"""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.scan import Page, Sample, Scanner
from extproc.engines.state import EngineState

_SCANNER = Scanner(
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "vllm:engine_sleep_state",
        "process_start_time_seconds",
    ]
)


def read(text: str, at: float) -> EngineState:
    """State from a page of vLLM."""
    page = _SCANNER.scan(text)
    adapters = _newest_adapters(page)
    generated = page.total("vllm:generation_tokens_total")
    return EngineState(
        at=at,
        running=page.total("vllm:num_requests_running"),
        waiting=page.total("vllm:num_requests_waiting"),
        kv_usage=page.share("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_blocks=_total_of_label(page, "num_gpu_blocks"),
        block_size=_block_size(page),
        prompt_tokens_total=page.total("vllm:prompt_tokens_total"),
        computed_prompt_tokens_total=_computed(page),
        first_tokens_total=page.total("vllm:time_to_first_token_seconds_count"),
        generation_tokens_total=generated,
        counts_steps=generated is not None,
        requests_done_total=page.total("vllm:request_success_total"),
        prefix_queries_total=page.total(
            "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"
        ),
        prefix_hits_total=page.total("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        preemptions_total=page.total("vllm:num_preemptions_total"),
        max_lora=_max_lora(adapters),
        running_adapters=_names(adapters, "running_lora_adapters"),
        waiting_adapters=_names(adapters, "waiting_lora_adapters"),
        sleeping=_sleeping(page),
        started_at=page.highest("process_start_time_seconds"),
    )


def _computed(page: Page) -> float | None:
    computed = page.total("vllm:prompt_tokens_by_source_total", source="local_compute")
    if computed is not None:
        return computed
    total, cached = page.total("vllm:prompt_tokens_total"), page.total("vllm:prompt_tokens_cached_total")
    return None if total is None or cached is None else max(total - cached, 0.0)


def _total_of_label(page: Page, label: str) -> int | None:
    numbers = [_whole(sample.labels.get(label)) for sample in page.of("vllm:cache_config_info")]
    known = [number for number in numbers if number]
    return sum(known) if known else None


def _block_size(page: Page) -> int | None:
    sizes = (_whole(sample.labels.get("block_size")) for sample in page.of("vllm:cache_config_info"))
    return next((size for size in sizes if size), None)


def _newest_adapters(page: Page) -> list[Sample]:
    newest: dict[str, Sample] = {}
    for sample in page.of("vllm:lora_requests_info"):
        rank = sample.labels.get("engine", "")
        if rank not in newest or sample.value >= newest[rank].value:
            newest[rank] = sample
    return list(newest.values())


def _names(adapters: list[Sample], label: str) -> frozenset[str] | None:
    if not adapters:
        return None
    listed = ",".join(sample.labels.get(label, "") for sample in adapters)
    return frozenset(name for name in (part.strip() for part in listed.split(",")) if name)


def _max_lora(adapters: list[Sample]) -> int | None:
    numbers = [number for sample in adapters if (number := _whole(sample.labels.get("max_lora"))) is not None]
    return min(numbers) if numbers else None


def _sleeping(page: Page) -> bool | None:
    awake = [
        sample.value
        for sample in page.of("vllm:engine_sleep_state")
        if sample.labels.get("sleep_state") == "awake"
    ]
    return min(awake) == 0 if awake else None


def _whole(text: str | None) -> int | None:
    # "None" is what vLLM writes before the KV cache has been sized.
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 15 else None


VLLM = Engine(
    "vllm",
    read,
    tells=frozenset(
        {
            "running",
            "waiting",
            "kv_usage",
            "prompt_tokens_total",
            "first_tokens_total",
            "block_size",
            "kv_blocks",
        }
    ),
)
