"""What scraping costs: 100 endpoints, 100 KB pages, once a second.

    python -m loadtest.scrape [--endpoints 100] [--seconds 10] [--page-kb 100]

Prints the share of one core that this process spends on scraping (the pages are served by another process),
the event loop's longest and 99th percentile delay while it does, and what one page costs to read, beside
prometheus_client's parser on the same page.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection

from prometheus_client.parser import text_string_to_metric_families

from extproc.edge.scraper import Scraper, ScrapeSettings
from extproc.engines.vllm import VLLM
from extproc.fleet.endpoint import Endpoint, EndpointSpec
from extproc.fleet.fleet import Fleet

HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:iteration_tokens_total",
    "http_request_duration_seconds",
)
PLAIN = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
)


def page(size: int) -> bytes:
    """A metrics page like vLLM's with as many engine ranks as fill ``size`` bytes."""
    lines: list[str] = ["process_start_time_seconds 1.79e+09"]
    length, rank = 0, 0
    while length < size:
        labels = f'engine="{rank}",model_name="meta-llama/Llama-3.1-8B-Instruct"'
        block = [f"{name}{{{labels}}} 17.0" for name in PLAIN]
        block.append(f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 60000.0')
        block.append(f'vllm:cache_config_info{{{labels},block_size="16",num_gpu_blocks="27645"}} 1.0')
        for name in HISTOGRAMS:
            block += [f"# HELP {name} Histogram.", f"# TYPE {name} histogram"]
            block += [f'{name}_bucket{{{labels},le="{bound / 8}"}} {bound * 3}.0' for bound in range(40)]
            block += [f"{name}_count{{{labels}}} 333.0", f"{name}_sum{{{labels}}} 912.5"]
        text = "\n".join(block)
        lines.append(text)
        length += len(text) + 1
        rank += 1
    return ("\n".join(lines)[:size].rpartition("\n")[0] + "\n").encode()


class PageServer(asyncio.Protocol):
    """Answers anything that ends a request head with the page: as little work as a server can do."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\r\n\r\n"):
            assert isinstance(self.transport, asyncio.Transport)
            self.transport.write(self.answer)


def serve(pipe: Connection, endpoints: int, size: int) -> None:
    """The other process: ``endpoints`` ports, one page; ends when the pipe does."""

    async def main() -> None:
        body = page(size)
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%s" % (
            len(body),
            body,
        )
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(lambda: PageServer(answer), "127.0.0.1", 0) for _ in range(endpoints)
        ]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.to_thread(pipe.poll, None)

    asyncio.run(main())


async def measure(ports: list[int], seconds: float) -> None:
    """Scrape all ports for ``seconds`` and print the cost."""
    fleet = Fleet()
    fleet.apply([EndpointSpec(f"c{port}", f"127.0.0.1:{port}", "pool") for port in ports])
    done: list[float] = []
    failed: list[str] = []

    def result(endpoint: Endpoint, reason: str, took: float) -> None:
        (done.append(took) if reason == "ok" else failed.append(reason))

    task = asyncio.create_task(Scraper(fleet, ScrapeSettings(), on_result=result).run())
    await asyncio.sleep(2.0)
    done.clear()
    cpu, wall, lags = await watched(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    idle_cpu, idle_wall, _ = await watched(seconds / 4)
    spent = cpu - idle_cpu * wall / idle_wall
    print(f"scrapes {len(done)} in {wall:.1f} s, failed {len(failed)}")
    print(f"core share {100 * spent / wall:.1f} %  ({1e6 * spent / max(len(done), 1):.0f} us a scrape)")
    print(f"loop delay p99 {1e3 * lags[len(lags) * 99 // 100]:.2f} ms, max {1e3 * lags[-1]:.2f} ms")


async def watched(seconds: float) -> tuple[float, float, list[float]]:
    """CPU seconds of this process, wall seconds, and the sorted delays of 5 ms sleeps meanwhile."""
    lags: list[float] = []
    cpu, began = time.process_time(), time.monotonic()
    for _ in range(int(seconds / 0.005)):
        before = time.monotonic()
        await asyncio.sleep(0.005)
        lags.append(time.monotonic() - before - 0.005)
    return time.process_time() - cpu, time.monotonic() - began, sorted(lags)


def best(times: int, work: object) -> float:
    """Shortest of ``times`` runs, in microseconds."""
    assert callable(work)
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest * 1e6


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--endpoints", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--page-kb", type=int, default=100)
    options = parser.parse_args()
    text = page(options.page_kb * 1000).decode()
    print(f"page {len(text)} bytes: read in {best(50, lambda: VLLM.read(text, 0.0)):.0f} us,", end=" ")
    print(f"prometheus_client's parser {best(3, lambda: list(text_string_to_metric_families(text))):.0f} us")
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs, options.endpoints, options.page_kb * 1000))
    server.start()
    try:
        asyncio.run(measure(ours.recv(), options.seconds))
    finally:
        ours.send("end")
        server.join(5)
        server.kill()


if __name__ == "__main__":
    main()
