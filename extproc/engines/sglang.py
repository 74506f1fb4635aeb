"""SGLang (0.5), started with ``--enable-metrics``.

Newer versions may write ``sglang_`` where older ones wrote ``sglang:``; both are read. With
``--enable-metrics-for-all-schedulers`` every tensor-parallel worker repeats the numbers of its data-parallel
rank, so counts are summed over ``dp_rank`` of the largest within it.

``prompt_tokens_total`` includes cached tokens. ``realtime_tokens_total`` splits prompt work into computed and
cached but moves only at log intervals. ``token_usage`` counts a hybrid model's state pool too;
``full_token_usage`` is the KV pool alone where it exists. Unknowable: adapters in use, sleep state.
"""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.scan import Page, Scanner
from extproc.engines.state import EngineState

_FAMILIES = (
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "full_token_usage",
    "prompt_tokens_total",
    "cached_tokens_total",
    "realtime_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_count",
    "num_requests_total",
    "num_retracted_requests_total",
    "cache_config_info",
)
_SCANNER = Scanner(
    [*(mark + name for mark in ("sglang:", "sglang_") for name in _FAMILIES), "process_start_time_seconds"]
)


def _both(name: str) -> tuple[str, str]:
    return f"sglang:{name}", f"sglang_{name}"


def read(text: str, at: float) -> EngineState:
    """State from a page of SGLang."""
    page = _SCANNER.scan(text)
    prompt = page.total(*_both("prompt_tokens_total"))
    return EngineState(
        at=at,
        running=page.total_by_rank(*_both("num_running_reqs"), rank="dp_rank"),
        waiting=page.total_by_rank(*_both("num_queue_reqs"), rank="dp_rank"),
        kv_usage=page.share(*_both("full_token_usage"), *_both("token_usage")),
        kv_blocks=_from_label(page, "num_pages"),
        block_size=_from_label(page, "page_size"),
        prompt_tokens_total=prompt,
        computed_prompt_tokens_total=page.total_by_rank(
            *_both("realtime_tokens_total"), rank="dp_rank", mode="prefill_compute"
        ),
        first_tokens_total=page.total(*_both("time_to_first_token_seconds_count")),
        generation_tokens_total=page.total(*_both("generation_tokens_total")),
        requests_done_total=page.total(*_both("num_requests_total")),
        prefix_queries_total=prompt,
        prefix_hits_total=page.total(*_both("cached_tokens_total")),
        preemptions_total=page.total_by_rank(*_both("num_retracted_requests_total"), rank="dp_rank"),
        started_at=page.highest("process_start_time_seconds"),
    )


def _from_label(page: Page, label: str) -> int | None:
    found = (sample.labels.get(label, "") for sample in page.of(*_both("cache_config_info")))
    return next(
        (int(text) for text in found if text.isascii() and text.isdigit() and 0 < len(text) <= 15), None
    )


SGLANG = Engine(
    "sglang",
    read,
    tells=frozenset({"running", "waiting", "kv_usage", "prompt_tokens_total", "first_tokens_total"}),
)
