"""Hugging Face Text Generation Inference (2 and 3).

The batch size is what runs, the queue size what waits. Prompt and output lengths are histograms over finished
requests, so their sums move only when a request ends: good as totals, useless as progress, and no first-token
counter exists. Unknowable: KV use, cache hits, computed prompt tokens, first tokens, adapters, sleep state.
"""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.scan import Scanner
from extproc.engines.state import EngineState

_SCANNER = Scanner(
    [
        "tgi_batch_current_size",
        "tgi_queue_size",
        "tgi_request_input_length_sum",
        "tgi_request_generated_tokens_sum",
        "tgi_request_success",
        "process_start_time_seconds",
    ]
)


def read(text: str, at: float) -> EngineState:
    """State from a page of TGI."""
    page = _SCANNER.scan(text)
    return EngineState(
        at=at,
        running=page.total("tgi_batch_current_size"),
        waiting=page.total("tgi_queue_size"),
        prompt_tokens_total=page.total("tgi_request_input_length_sum"),
        generation_tokens_total=page.total("tgi_request_generated_tokens_sum"),
        requests_done_total=page.total("tgi_request_success"),
        started_at=page.highest("process_start_time_seconds"),
    )


TGI = Engine("tgi", read, tells=frozenset({"running", "waiting"}), keep_alive_s=None)
