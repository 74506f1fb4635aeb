"""Triton Inference Server with the TensorRT-LLM backend.

Metrics are on their own port (8002 by default), updated every two seconds by default; readiness is
``/v2/health/ready``. The scheduler's gauges are one family each with the kind in a label. Every model of an
ensemble counts each request once, so finished requests are the largest count among the models. Unknowable:
prompt tokens, first tokens, prefix hits, adapters, sleep state.
"""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.scan import Page, Scanner
from extproc.engines.state import EngineState

_REQUESTS = "nv_trt_llm_request_metrics"
_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_SCANNER = Scanner([_REQUESTS, _BLOCKS, "nv_inference_request_success"])


def read(text: str, at: float) -> EngineState:
    """State from a page of Triton."""
    page = _SCANNER.scan(text)
    return EngineState(
        at=at,
        running=page.total(_REQUESTS, request_type="scheduled"),
        waiting=page.total(_REQUESTS, request_type="waiting"),
        kv_usage=_usage(page),
        kv_blocks=_whole(page, "max"),
        block_size=_whole(page, "tokens_per"),
        requests_done_total=page.highest("nv_inference_request_success"),
    )


def _usage(page: Page) -> float | None:
    told = page.highest(_BLOCKS, kv_cache_block_type="fraction")
    if told is not None:
        return min(told, 1.0)
    used, most = (
        page.total(_BLOCKS, kv_cache_block_type="used"),
        page.total(_BLOCKS, kv_cache_block_type="max"),
    )
    return None if used is None or not most else min(used / most, 1.0)


def _whole(page: Page, kind: str) -> int | None:
    value = page.highest(_BLOCKS, kv_cache_block_type=kind)
    return int(value) if value else None


TRITON = Engine(
    "triton",
    read,
    tells=frozenset({"running", "kv_usage"}),
    metrics_port=8002,
    health_path="/v2/health/ready",
    keep_alive_s=None,
)
