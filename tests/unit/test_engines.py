"""What each engine's page says, and what it cannot say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.registry import ENGINES, engine_named
from extproc.engines.state import EngineState

PAGES = Path(__file__).parent / "fixtures" / "metrics"


def read(engine: str, file: str) -> EngineState:
    return ENGINES[engine].read((PAGES / file).read_text(), 5.0)


def vllm(text: str) -> EngineState:
    return ENGINES["vllm"].read(text, 0.0)


def test_vllm_today() -> None:
    assert read("vllm", "vllm-0.32.prom") == EngineState(
        at=5.0,
        running=7.0,
        waiting=3.0,
        kv_usage=0.4375,
        kv_blocks=27645,
        block_size=16,
        prompt_tokens_total=200_000.0,
        computed_prompt_tokens_total=60_000.0,
        first_tokens_total=333.0,
        generation_tokens_total=51_234.0,
        counts_steps=True,
        requests_done_total=325.0,
        prefix_queries_total=220_000.0,
        prefix_hits_total=150_000.0,
        preemptions_total=4.0,
        max_lora=4,
        running_adapters=frozenset({"sql", "legal"}),
        waiting_adapters=frozenset(),
        sleeping=False,
        started_at=1.79e9,
    )


def test_a_page_that_a_real_vllm_wrote() -> None:
    assert read("vllm", "vllm-0.32-real.txt") == EngineState(
        at=5.0,
        running=1.0,
        waiting=0.0,
        kv_usage=0.0018005645838101714,
        kv_blocks=65536,
        block_size=32,
        prompt_tokens_total=177_325.0,
        computed_prompt_tokens_total=76_333.0,
        first_tokens_total=64.0,
        generation_tokens_total=505.0,
        counts_steps=True,
        requests_done_total=63.0,
        prefix_queries_total=177_325.0,
        prefix_hits_total=100_992.0,
        preemptions_total=0.0,
        sleeping=False,
        started_at=1_795_973_078.31,
    )


def test_vllm_with_old_names() -> None:
    state = read("vllm", "vllm-0.6.prom")
    assert state.kv_usage == 0.125
    assert (state.prefix_queries_total, state.prefix_hits_total) == (1000.0, 250.0)
    assert state.block_size == 16
    assert state.kv_blocks is None, "num_gpu_blocks is written as None before the cache is sized"


def test_vllm_counts_are_summed_over_ranks_and_usage_is_the_fullest() -> None:
    state = read("vllm", "vllm-two-ranks.prom")
    assert (state.running, state.waiting, state.kv_usage) == (6.0, 2.0, 0.91)
    assert (state.kv_blocks, state.block_size) == (2000, 32)
    assert state.sleeping is True, "one rank asleep makes the engine asleep"


def test_vllm_kv_usage_with_both_names_is_the_new_one() -> None:
    assert vllm("vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.5\n").kv_usage == 0.5


def test_vllm_kv_usage_with_neither_name_is_unknown_and_said_to_be_missing() -> None:
    state = vllm("vllm:num_requests_running 0\n")
    assert state.kv_usage is None
    assert state.running == 0.0
    assert "kv_usage" in ENGINES["vllm"].missing(state)
    assert "running" not in ENGINES["vllm"].missing(state)


def test_vllm_without_lora_has_no_adapters_and_misses_nothing() -> None:
    text = (PAGES / "vllm-0.32.prom").read_text()
    state = vllm("\n".join(line for line in text.split("\n") if "lora" not in line))
    assert (state.max_lora, state.running_adapters, state.waiting_adapters) == (None, None, None)
    assert ENGINES["vllm"].missing(state) == []


def test_vllm_computed_tokens_from_the_cached_counter_where_sources_are_not_told() -> None:
    state = vllm("vllm:prompt_tokens_total 100\nvllm:prompt_tokens_cached_total 30\n")
    assert state.computed_prompt_tokens_total == 70.0


def test_vllm_discarded_weights_are_sleep() -> None:
    assert vllm('vllm:engine_sleep_state{sleep_state="awake"} 0\n').sleeping is True
    assert vllm("").sleeping is None


def test_sglang_workers_of_a_rank_count_once() -> None:
    assert read("sglang", "sglang-0.5-dp2-tp2.prom") == EngineState(
        at=5.0,
        running=7.0,
        waiting=5.0,
        kv_usage=0.6,
        kv_blocks=5000,
        block_size=64,
        prompt_tokens_total=2000.0,
        computed_prompt_tokens_total=300.0,
        first_tokens_total=44.0,
        generation_tokens_total=700.0,
        requests_done_total=42.0,
        prefix_queries_total=2000.0,
        prefix_hits_total=1700.0,
    )


def test_sglang_with_underscores() -> None:
    text = (PAGES / "sglang-0.5-dp2-tp2.prom").read_text()
    engine = ENGINES["sglang"]
    assert engine.read(text.replace("sglang:", "sglang_"), 5.0) == engine.read(text, 5.0)


def test_trtllm() -> None:
    assert read("trtllm", "trtllm-1.2.prom") == EngineState(
        at=5.0,
        running=6.0,
        waiting=1.0,
        kv_usage=0.62,
        kv_blocks=4000,
        block_size=32,
        prompt_tokens_total=9000.0,
        computed_prompt_tokens_total=4000.0,
        first_tokens_total=43.0,
        generation_tokens_total=800.0,
        requests_done_total=42.0,
        prefix_queries_total=400.0,
        prefix_hits_total=300.0,
    )


def test_triton() -> None:
    assert read("triton", "triton-25.prom") == EngineState(
        at=5.0,
        running=4.0,
        waiting=5.0,
        kv_usage=0.25,
        kv_blocks=6240,
        block_size=64,
        requests_done_total=93.0,
    )


def test_triton_without_fraction_divides_blocks() -> None:
    text = (PAGES / "triton-25.prom").read_text()
    lines = [line for line in text.split("\n") if "fraction" not in line]
    assert ENGINES["triton"].read("\n".join(lines), 0.0).kv_usage == 0.25


def test_tgi() -> None:
    assert read("tgi", "tgi-3.prom") == EngineState(
        at=5.0,
        running=5.0,
        waiting=3.0,
        prompt_tokens_total=30_000.0,
        generation_tokens_total=9000.0,
        requests_done_total=150.0,
    )


def test_llamacpp() -> None:
    assert read("llamacpp", "llamacpp-b6700.prom") == EngineState(
        at=5.0,
        running=4.0,
        waiting=46.0,
        computed_prompt_tokens_total=5120.0,
        generation_tokens_total=39_080.0,
    )


def test_an_unknown_engine_is_one_of_which_nothing_is_known() -> None:
    engine = engine_named("homemade")
    assert engine.metrics_path is None
    assert engine.read("anything 1\n", 1.0) == EngineState(at=1.0)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_an_empty_page_says_nothing(name: str) -> None:
    assert ENGINES[name].read("", 1.0) == EngineState(at=1.0)


@pytest.mark.parametrize("name", sorted(ENGINES))
@given(noise=st.binary(max_size=200))
def test_a_torn_page_is_read_without_complaint(name: str, noise: bytes) -> None:
    text = "".join(path.read_text() for path in sorted(PAGES.glob("*.prom")))
    cut = int.from_bytes(noise[:2], "big") % len(text)
    ENGINES[name].read(text[:cut] + noise.decode("utf-8", "replace") + text[cut:], 1.0)


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_field_an_engine_promises_exists(name: str) -> None:
    assert ENGINES[name].tells <= set(EngineState.__dataclass_fields__)
