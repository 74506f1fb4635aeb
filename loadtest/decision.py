"""How long our own code needs for one decision: hash, match, rank, claim. No network, no parsing, one core.

    python -m loadtest.decision                 # 10k, 100k and 1M blocks in the index
    python -m loadtest.decision --blocks 10000000 --memory-gb 4

For every prompt size and number of endpoints the index is filled with other prompts up to the wanted number of blocks
(or until the memory bound), then one multi-turn prompt that two endpoints hold is decided again and again, with the
backlogs, leases and scrapes of a loaded fleet. Budgets: 4 KB in 150 us and 220 KB in 1.5 ms with 16 endpoints, whatever
the size of the index. Times are medians; ratios between rows mean more than the numbers, which are this machine's.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import time

from extproc.api.request import Prompt
from extproc.engines.state import EngineState
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.model_stats import ModelStats
from extproc.kvcache.approximate import ApproximateIndex
from extproc.kvcache.view import CacheView
from extproc.scheduling.registry import build
from extproc.scheduling.strategy import Candidate, Query

BUDGETS_US = {(4_000, 16): 150.0, (220_000, 16): 1500.0}


def fleet(count: int, rng: random.Random) -> list[Endpoint]:
    """Endpoints with leases, backlog and a scrape."""
    endpoints = []
    for slot in range(count):
        endpoint = Endpoint(EndpointSpec(f"replica-{slot}", "10.0.0.1:8000", "pool"), slot)
        for at in (0.0, 1.0):
            state = EngineState(
                at=at,
                running=float(rng.randrange(20)),
                waiting=float(rng.randrange(3)),
                kv_usage=rng.uniform(0.2, 0.97),
                kv_blocks=20_000,
                block_size=16,
                first_tokens_total=at,
            )
            endpoint.observe(state, endpoint.state, at)
        for _ in range(rng.randrange(20)):
            endpoint.leases += 1
            endpoint.backlog.add(rng.randrange(3000), 1.0, endpoint.rates.prefill)
        endpoints.append(endpoint)
    return endpoints


def fill(index: ApproximateIndex, endpoints: int, blocks: int, memory_gb: float, rng: random.Random) -> int:
    """Insert other prompts' blocks up to ``blocks`` or the memory bound; returns how many are held."""
    for slot in range(endpoints):
        index.resize(slot, 1 << 30)
    while index.entries < blocks:
        for _ in range(min(64, (blocks - index.entries) // 512 + 1)):
            index.insert(rng.randrange(endpoints), [rng.getrandbits(64) for _ in range(512)]).keep()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 > memory_gb:
            break
    return index.entries


def measure(size: int, endpoints: int, blocks: int, memory_gb: float) -> dict[str, float]:
    """Median microseconds of each step of a decision."""
    rng = random.Random(1)
    index = ApproximateIndex(max_blocks=1 << 40)
    view = CacheView(index, ModelStats(), seed=7)
    strategy = build("expected-latency", {}, rng)
    held = fill(index, endpoints, blocks, memory_gb, rng)
    targets = fleet(endpoints, rng)
    history = rng.randbytes(size * 9 // 10)
    for slot in (0, endpoints // 2):
        warm = Prompt(pieces=(history,), size=len(history))
        index.insert(slot, view.look(warm, "model").hashes).keep()
    gc.collect()
    gc.freeze()
    steps: dict[str, list[float]] = {name: [] for name in ("hash", "match", "rank", "claim")}
    for number in range(60 if endpoints > 500 else 200):
        prompt = Prompt(pieces=(history, rng.randbytes(size - len(history))), size=size)
        now = 1.5 + number * 0.001
        marks = [time.perf_counter()]
        look = view.look(prompt, "model")
        marks.append(time.perf_counter())
        matched = view.match(look)
        candidates = [Candidate(endpoint, matched.get(endpoint.slot, 0)) for endpoint in targets]
        marks.append(time.perf_counter())
        query = Query("id", "model", prompt_tokens=look.prompt_tokens, output_tokens=256, stream=True)
        best = strategy.rank(query, candidates, now)[0]
        marks.append(time.perf_counter())
        view.claim(best.endpoint, look).keep()
        marks.append(time.perf_counter())
        for name, start, end in zip(steps, marks, marks[1:], strict=False):
            steps[name].append((end - start) * 1e6)
    row = {name: statistics.median(values) for name, values in steps.items()}
    row["total"] = statistics.median(map(sum, zip(*steps.values(), strict=True)))
    row["held"] = held
    gc.unfreeze()
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time of one decision by prompt, fleet and index size.")
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4_000, 220_000])
    parser.add_argument("--endpoints", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--memory-gb", type=float, default=3.0)
    wanted = parser.parse_args()
    print("  prompt  endpoints   blocks held    hash   match    rank   claim   total us   budget")
    for size in wanted.sizes:
        for endpoints in wanted.endpoints:
            for blocks in wanted.blocks:
                row = measure(size, endpoints, blocks, wanted.memory_gb)
                budget = BUDGETS_US.get((size, endpoints))
                verdict = (
                    "" if budget is None else f"{budget:7.0f} {'ok' if row['total'] <= budget else 'OVER'}"
                )
                print(
                    f"{size:8d} {endpoints:10d} {row['held']:13.0f} {row['hash']:7.0f} {row['match']:7.0f}"
                    f" {row['rank']:7.0f} {row['claim']:7.0f} {row['total']:10.0f} {verdict}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
