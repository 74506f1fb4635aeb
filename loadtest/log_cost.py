"""What one access log record costs a processor: CPU per record while it closes real leases."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from loadtest.cpu import cpu_seconds
from loadtest.processor_client import ProcessorClient, end_record, messages, prompt

_AT_ONCE = 32


async def record_cost_s(socket_path: Path, pid: int, port: int, *, records: int = 500) -> float:
    """CPU seconds per record: decide ``records`` requests, then send their ends in one go and weigh only
    that.

    Raises RuntimeError when the processor refuses a request.
    """
    client = ProcessorClient(socket_path)
    try:
        content = prompt(4096)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def decide(request_id: str) -> str:
            async with gate:
                return await client.decide(request_id, content)

        ids = [str(uuid.uuid4()) for _ in range(records)]
        clusters = await asyncio.gather(*(decide(request_id) for request_id in ids))
        if not all(clusters):
            raise RuntimeError("the processor refused a request")
        entries = [
            end_record(request_id, cluster, port) for request_id, cluster in zip(ids, clusters, strict=True)
        ]
        made = messages(entries)
        await asyncio.sleep(0.2)  # let what deciding left behind settle before the clock is read
        call = client.open_log()
        before = cpu_seconds(pid)
        for message in made:
            await call.write(message)
        await call.done_writing()
        await call
        return (cpu_seconds(pid) - before) / records
    finally:
        await client.close()
