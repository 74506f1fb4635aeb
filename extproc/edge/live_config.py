"""The configuration that rules now, and the road to the next one.

Rules of this file:

- both files are read, checked and built into one snapshot; a bad one changes nothing but a log line and a counter;
- a change that takes more than half of a pool's endpoints needs ``removal.allow_big_removals`` (a truncated file must not
  empty a pool);
- additions: publish, wait until Envoy uses the clusters, then swap the snapshot. Removals: swap, wait for the leases or the
  deadline, then publish without them. A file that Envoy refuses keeps the old snapshot;
- a new cluster that Envoy has not got in time (its name does not resolve) is left out until it is there: a decision
  for it would be an error for the client;
- one change at a time; what came meanwhile is read afterwards, so the newest files always win;
- addresses that DNS changed are swapped in without touching Envoy: it asks DNS itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from extproc.config.load import load
from extproc.config.problem import ConfigError, Problem
from extproc.config.schema.settings import START_ONLY, Settings
from extproc.config.snapshot import Snapshot
from extproc.edge.publisher import Publication, Publisher
from extproc.edge.resolver import Resolver
from extproc.edge.watcher import Fingerprint, changes, fingerprint
from extproc.fleet.endpoint import EndpointSpec

log = logging.getLogger(__name__)

_LISTING_POLL_S = 0.5


class LiveConfig:
    """Owns the snapshot. ``install`` swaps it into the core; ``idle`` waits until no lease needs a removed endpoint;
    ``on_reload`` hears of every attempt: the generation in use, and whether it is a new one.
    """

    def __init__(
        self,
        config_path: Path,
        snapshot: Snapshot,
        publisher: Publisher,
        *,
        install: Callable[[Snapshot, tuple[EndpointSpec, ...]], None],
        idle: Callable[[], Awaitable[object]],
        on_reload: Callable[[int, bool], None] = lambda generation, taken: None,
    ) -> None:
        self.snapshot = snapshot
        self.problems: tuple[Problem, ...] = ()
        """Of the last attempt; empty when it was taken."""
        self.config_path = config_path
        self._started_with = snapshot.settings
        self._publisher = publisher
        self._resolver = Resolver(snapshot.clusters.dns)
        self._install = install
        self._idle = idle
        self._on_reload = on_reload
        self._lock = asyncio.Lock()
        self._removal: asyncio.Task[None] | None = None
        self._unlisted: frozenset[str] = frozenset()
        self._listing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolve, publish and install the first snapshot."""
        await self._resolver.refresh()
        outcome = await self._publisher.publish(self.snapshot.clusters.resources)
        if outcome is Publication.REFUSED:
            log.error("Envoy refuses the published clusters; its log says why")
        await self._hold_back(outcome, self.snapshot, known=frozenset())
        self._swap(self.snapshot)
        self._on_reload(self.snapshot.generation, True)

    async def run(self) -> None:
        """Watch files and names for ever; ends by cancellation."""
        names = asyncio.create_task(self._resolver.run(self._readdress))
        try:
            while True:
                await self._watch_once()
        finally:
            for task in (names, self._removal, self._listing):
                if task is not None:
                    task.cancel()

    async def reload(self, *, allow_removals: bool = False) -> tuple[Problem, ...]:
        """Read the files and take them over; returns what is wrong, nothing when they were taken.

        ``allow_removals``: an operator asked for it, so that even the greater part of a pool may go.
        """
        async with self._lock:
            current = self.snapshot
            try:
                snapshot = await asyncio.to_thread(load, self.config_path, generation=current.generation + 1)
                if not allow_removals:
                    self._guard_removals(current, snapshot)
            except ConfigError as error:
                return self._refuse(error.problems)
            except Exception:
                # A fault of ours must not end the watching: the old state stays and the next edit is read.
                log.exception("configuration not read")
                message = "extproc failed to read this; its log says where. The old state stays"
                return self._refuse([Problem(str(self.config_path), 0, message)])
            self._resolver.watch(snapshot.clusters.dns)
            await self._resolver.refresh()
            try:
                outcome = await self._publisher.publish(snapshot.clusters.resources)
            except OSError as error:
                message = f"cannot be written: {error.strerror}; clusters stay as they were"
                return self._refuse([Problem(str(snapshot.settings.envoy.live), 0, message)])
            if outcome is Publication.REFUSED:
                self._resolver.watch(current.clusters.dns)
                message = "Envoy refuses these clusters (its log says why); the last good ones stay"
                return self._refuse([Problem(str(snapshot.settings.envoy.clusters), 0, message)])
            await self._hold_back(outcome, snapshot, known=current.clusters.names.keys() - self._unlisted)
            self._swap(snapshot)
            self._on_reload(snapshot.generation, True)
            self.problems = ()
            log.info("configuration taken", extra={"generation": snapshot.generation, "envoy": outcome.value})
            for warning in snapshot.warnings:
                log.warning(str(warning))
            for key in waiting_for_a_start(self._started_with, snapshot.settings):
                log.warning("this key changes with the next start of extproc only", extra={"key": key})
            self._finish_removal(snapshot)
            return ()

    @property
    def unresolved(self) -> frozenset[tuple[str, int]]:
        """DNS names whose last question failed."""
        return self._resolver.failing

    async def _watch_once(self) -> None:
        """Until the set of files to watch changes."""
        paths = self._files()
        state: Fingerprint = await asyncio.to_thread(fingerprint, paths)
        if await self._unseen():
            await self.reload()
        async for changed in changes(paths, since=state):
            log.info("files changed", extra={"files": sorted(path.name for path in changed)})
            await self.reload()
            if self._files() != paths:
                return

    async def _unseen(self) -> bool:
        """Whether the files say something else than what rules: an edit between reading and watching."""
        try:
            found = await asyncio.to_thread(load, self.config_path, generation=self.snapshot.generation)
        except Exception:
            return True  # reload says what is wrong
        return (found.settings, found.clusters) != (self.snapshot.settings, self.snapshot.clusters)

    def _files(self) -> tuple[Path, ...]:
        settings = self.snapshot.settings
        return (
            self.config_path,
            settings.envoy.clusters,
            *self.snapshot.clusters.files,
            *self.snapshot.secret_files,
        )

    def _swap(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        specs = snapshot.clusters.expand(self._resolver.addresses)
        self._install(snapshot, tuple(spec for spec in specs if spec.cluster not in self._unlisted))

    async def _hold_back(self, outcome: Publication, snapshot: Snapshot, known: AbstractSet[str]) -> None:
        """Keep away from new clusters that Envoy has not got yet; a task gives them free one by one."""
        if self._listing is not None:
            self._listing.cancel()
            self._listing = None
        if self._unlisted or outcome in (Publication.LATE, Publication.REFUSED):
            self._unlisted = await self._publisher.unlisted(snapshot.clusters.resources) - known
        if self._unlisted:
            log.warning("clusters that Envoy does not use yet", extra={"clusters": sorted(self._unlisted)})
            self._listing = asyncio.create_task(self._wait_for_listing())

    async def _wait_for_listing(self) -> None:
        while self._unlisted:
            await asyncio.sleep(_LISTING_POLL_S)
            async with self._lock:
                left = self._unlisted & await self._publisher.unlisted(self.snapshot.clusters.resources)
                if left != self._unlisted:
                    self._unlisted = left
                    self._swap(self.snapshot)

    async def _readdress(self) -> None:
        async with self._lock:
            self._swap(self.snapshot)

    def _finish_removal(self, snapshot: Snapshot) -> None:
        resources = snapshot.clusters.resources
        if self._publisher.removes(resources):
            deadline_s = snapshot.settings.removal.drain_deadline
            waiting = self._publisher.finish_removal(resources, self._idle, deadline_s)
            self._removal = asyncio.create_task(_logged(waiting))

    def _refuse(self, problems: list[Problem] | tuple[Problem, ...]) -> tuple[Problem, ...]:
        self._on_reload(self.snapshot.generation, False)
        self.problems = tuple(problems)
        log.error("configuration refused, the old one stays", extra={"problems": len(self.problems)})
        for problem in self.problems:
            log.error(str(problem))
        return self.problems

    def _guard_removals(self, old: Snapshot, new: Snapshot) -> None:
        if new.settings.removal.allow_big_removals:
            return
        kept = {spec.key for spec in new.clusters.endpoints}
        before = Counter(spec.pool for spec in old.clusters.endpoints)
        lost = Counter(spec.pool for spec in old.clusters.endpoints if spec.key not in kept)
        file = str(new.settings.envoy.clusters)
        problems = [
            Problem(
                file,
                0,
                f"this takes {count} of {before[pool]} endpoints from pool `{pool}`; if that is meant, write "
                "`removal: {allow_big_removals: true}` in extproc.yaml for this change",
            )
            for pool, count in lost.items()
            if count * 2 > before[pool]
        ]
        if problems:
            raise ConfigError(problems)


def waiting_for_a_start(started_with: Settings, now: Settings) -> list[str]:
    """Keys whose written value is not the one in use, since they are taken at start only."""
    return [key for key in START_ONLY if _at(started_with, key) != _at(now, key)]


def _at(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


async def _logged(waiting: Awaitable[bool]) -> None:
    try:
        if await waiting:
            log.info("removed clusters are gone from Envoy")
    except OSError:
        log.exception("removed clusters could not be taken from Envoy")
