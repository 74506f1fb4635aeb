"""Fixtures for tests with a real vLLM. Without one installed (``make test-engine`` does it) they are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.engine.vllm_server import Vllm, installed, running_vllm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed() is None:
        skip = pytest.mark.skip(reason="no vLLM: run `make test-engine`, or set VLLM_DIR")
        for item in items:
            if "tests/engine" in str(item.path):
                item.add_marker(skip)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vllm]:
    """One server for a file's tests."""
    async with running_vllm(tmp_path_factory.mktemp("vllm"), "--trust-request-chat-template") as server:
        yield server
