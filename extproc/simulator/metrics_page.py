"""The /metrics page under the names of vLLM 0.32."""

from __future__ import annotations

import time

from extproc.simulator.counters import EngineMetrics
from extproc.simulator.histogram import Histogram
from extproc.simulator.profile import Profile

_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
_LORA_SERIES = 64


class MetricsPage:
    """Renders one engine's metrics; remembers what vLLM's page would still show."""

    def __init__(self, model: str, profile: Profile) -> None:
        self._labels = f'engine="0",model_name="{_escaped(model)}"'
        self._profile = profile
        self._started = time.time()
        self._lora: dict[tuple[str, str], float] = {}
        self.finished: dict[str, int] = dict.fromkeys(_FINISHED_REASONS, 0)
        """Ended requests by vLLM's finished_reason."""

    def render(self, metrics: EngineMetrics, ttft: Histogram, e2e: Histogram) -> str:
        """The page as text."""
        counters = metrics.counters
        lines: list[str] = []
        self._one(lines, "num_requests_running", "gauge", metrics.running)
        self._one(lines, "num_requests_waiting", "gauge", metrics.waiting)
        self._one(lines, "kv_cache_usage_perc", "gauge", metrics.kv_usage)
        self._head(lines, "vllm:engine_sleep_state", "gauge")
        for state, value in (("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)):
            lines.append(f'vllm:engine_sleep_state{{{self._labels},sleep_state="{state}"}} {value}')
        self._one(lines, "prefix_cache_queries_total", "counter", counters.prefix_queries)
        self._one(lines, "prefix_cache_hits_total", "counter", counters.prefix_hits)
        self._one(lines, "num_preemptions_total", "counter", counters.preemptions)
        self._one(lines, "prompt_tokens_total", "counter", counters.prompt_tokens)
        self._head(lines, "vllm:prompt_tokens_by_source_total", "counter")
        for source, tokens in (
            ("local_compute", counters.computed_prompt_tokens),
            ("local_cache_hit", counters.cached_prompt_tokens),
            ("external_kv_transfer", 0),
        ):
            lines.append(
                f'vllm:prompt_tokens_by_source_total{{{self._labels},source="{source}"}} {float(tokens)}'
            )
        self._one(lines, "prompt_tokens_cached_total", "counter", counters.cached_prompt_tokens)
        self._one(lines, "generation_tokens_total", "counter", counters.generation_tokens)
        self._head(lines, "vllm:request_success_total", "counter")
        for reason, ended in self.finished.items():
            lines.append(
                f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(ended)}'
            )
        for name, histogram in (("time_to_first_token_seconds", ttft), ("e2e_request_latency_seconds", e2e)):
            self._head(lines, f"vllm:{name}", "histogram")
            lines += histogram.lines(f"vllm:{name}", self._labels)
        self._head(lines, "vllm:cache_config_info", "gauge")
        lines.append(
            f'vllm:cache_config_info{{block_size="{self._profile.block_size}",cache_dtype="auto",'
            f'enable_prefix_caching="True",engine="0",num_gpu_blocks="{self._profile.kv_blocks}"}} 1.0'
        )
        if self._profile.max_loras:
            self._render_adapters(lines, metrics)
        self._head(lines, "process_start_time_seconds", "gauge")
        lines.append(f"process_start_time_seconds {self._started:.2f}")
        return "\n".join(lines) + "\n"

    def _render_adapters(self, lines: list[str], metrics: EngineMetrics) -> None:
        """As in vLLM every combination of adapters is a series of its own; its value is when it was last
        true."""
        combination = (",".join(metrics.running_adapters), ",".join(metrics.waiting_adapters))
        self._lora.pop(combination, None)
        self._lora[combination] = time.time()
        if len(self._lora) > _LORA_SERIES:
            del self._lora[next(iter(self._lora))]
        self._head(lines, "vllm:lora_requests_info", "gauge")
        for (running, waiting), at in self._lora.items():
            lines.append(
                f'vllm:lora_requests_info{{max_lora="{self._profile.max_loras}",'
                f'running_lora_adapters="{_escaped(running)}",'
                f'waiting_lora_adapters="{_escaped(waiting)}"}} {at!r}'
            )

    def _one(self, lines: list[str], name: str, kind: str, value: float) -> None:
        self._head(lines, f"vllm:{name}", kind)
        lines.append(f"vllm:{name}{{{self._labels}}} {float(value)}")

    @staticmethod
    def _head(lines: list[str], name: str, kind: str) -> None:
        family = name.removesuffix("_total") if kind == "counter" else name
        lines.append(
            f"# HELP {name} {family.removeprefix('vllm:').replace('_', ' ')} of the simulated engine"
        )
        lines.append(f"# TYPE {name} {kind}")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
