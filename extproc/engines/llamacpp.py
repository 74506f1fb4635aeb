"""llama.cpp's ``llama-server``, started with ``--metrics``.

Prompt tokens are counted when processed, cached ones excluded. The KV gauge existed in older builds only.
Unknowable: KV blocks, cache hits, prompt tokens with cached ones, first tokens, adapters, sleep state.
"""

from __future__ import annotations

from extproc.engines.engine import Engine
from extproc.engines.scan import Scanner
from extproc.engines.state import EngineState

_SCANNER = Scanner(
    [
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:kv_cache_usage_ratio",
        "llamacpp:prompt_tokens_total",
        "llamacpp:tokens_predicted_total",
    ]
)


def read(text: str, at: float) -> EngineState:
    """State from a page of llama-server."""
    page = _SCANNER.scan(text)
    return EngineState(
        at=at,
        running=page.total("llamacpp:requests_processing"),
        waiting=page.total("llamacpp:requests_deferred"),
        kv_usage=page.share("llamacpp:kv_cache_usage_ratio"),
        computed_prompt_tokens_total=page.total("llamacpp:prompt_tokens_total"),
        generation_tokens_total=page.total("llamacpp:tokens_predicted_total"),
    )


LLAMACPP = Engine("llamacpp", read, tells=frozenset({"running", "waiting"}))
