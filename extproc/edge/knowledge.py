"""What is known of the engines beyond their metrics, put together: KV events, model lists, GPU use, tokens of prompts,
sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from extproc.api.request import InferenceRequest
from extproc.config.schema import Settings
from extproc.config.snapshot import Snapshot
from extproc.core import Core
from extproc.edge.dcgm_poll import DcgmPoll
from extproc.edge.kv_events import KvEvents
from extproc.edge.models_poll import ModelsPoll
from extproc.edge.scraper import Access
from extproc.edge.tokenizer_pool import TokenizerPool
from extproc.fleet.endpoint import EndpointSpec
from extproc.routing.match import Match
from extproc.routing.tenant import Tenant
from extproc.telemetry.kv_bindings import bind_kv_events
from extproc.telemetry.metrics import Metrics


class Knowledge:
    """Owned by the gateway. What ``settings`` says of threads and bounds holds for the process's life; tokenizers,
    sessions and endpoints follow the configuration."""

    def __init__(self, core: Core, settings: Settings, access: Callable[[EndpointSpec], Access]) -> None:
        self.kv_events = KvEvents(
            core.fleet.endpoints,
            core.view.ranks,
            access=access,
            replay_timeout_s=settings.kv_events.replay_timeout,
            on_told=core.ledger.told,
        )
        self.models_poll = ModelsPoll(core.fleet, access=access)
        self.dcgm_poll = DcgmPoll(core.fleet.endpoints)
        said = settings.tokenizers
        self.tokenizers = TokenizerPool(
            threads=said.threads, deadline_s=said.deadline, max_tokens=said.memory
        )
        self._core = core

    async def run(self) -> None:
        """Listen and ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.kv_events.run())
            group.create_task(self.models_poll.run())
            group.create_task(self.dcgm_poll.run())

    def close(self) -> None:
        """Let the threads go."""
        self.tokenizers.close()

    def install(self, snapshot: Snapshot) -> None:
        """Take over a configuration."""
        pools = snapshot.settings.pools
        self.tokenizers.install(
            {name: said.tokenizer for name, said in pools.items() if said.tokenizer is not None}
        )
        said, sessions = snapshot.settings.sessions, self._core.dispatcher.sessions
        sessions.ttl_s, sessions.most, sessions.saves_s = said.ttl, said.max_sessions, said.saves

    async def prepare(self, request: InferenceRequest, body: bytes | None, tenant: Tenant) -> None:
        """Before the decision: the prompt's tokens, where its pool has a tokenizer and they come in time."""
        if not self.tokenizers or not body or request.prompt.token_ids is not None:
            return
        match = self._core.dispatcher.match(request, tenant)
        if isinstance(match, Match):
            request.prompt.tokens = await self.tokenizers.tokens(match.pool.name, request.api, body)

    def caches(self) -> dict[str, tuple[Callable[[], int], Callable[[], int]]]:
        """Bounded maps by name: entries and cap."""
        precise, sessions, tokenizers = (
            self._core.view.precise,
            self._core.dispatcher.sessions,
            self.tokenizers,
        )
        return {
            "precise_index": (lambda: precise.entries, lambda: precise.max_blocks),
            "sessions": (lambda: len(sessions), lambda: sessions.most),
            "tokenizer_tokens": (lambda: tokenizers.remembered, lambda: tokenizers.cap),
        }

    def bind(self, metrics: Metrics) -> None:
        """Show what is known."""
        core, tokenizers = self._core, self.tokenizers
        bind_kv_events(metrics, core.view, self.kv_events, core.fleet.endpoints)
        metrics.bind(
            "tokenizer_requests", lambda: {(what,): count for what, count in dict(tokenizers.results).items()}
        )
        metrics.bind("tokenizer_broken", lambda: {(pool,): 1.0 for pool in tokenizers.broken})
        metrics.bind("adapters_known", lambda: len(core.fleet.adapters.pool_of))
