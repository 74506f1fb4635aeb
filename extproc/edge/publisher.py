"""Clusters -> ``live/clusters.yaml``, the file Envoy reads, in an order that loses no request.

Rules of this file:

- Envoy reads the directory's file when a finished one is renamed into place, never a half-written one;
- additions first, removals last: :meth:`Publisher.publish` writes the union of what is live and what is
  wanted, and returns when Envoy uses it; the caller then swaps its snapshot; :meth:`Publisher.finish_removal`
  waits until nothing needs the rest, and writes what is wanted alone;
- the union is made of endpoints too: a cluster that loses an endpoint keeps it until the removal is finished;
- a newer publish ends a removal that still waits; what it would have removed goes with the newer one;
- a file that Envoy refuses is taken back: the last good one is written again;
- the file is written only when its content changes, and names its content in ``version_info``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from extproc.config.envoy_message import field
from extproc.edge.envoy_admin import AdminUnreachable, CdsState, EnvoyAdmin

log = logging.getLogger(__name__)

Resource = dict[str, Any]
FILE = "clusters.yaml"
_POLL_S = 0.02


class Publication(StrEnum):
    """What became of a publish."""

    USED = "used"
    """Envoy uses it: safe to decide for the new endpoints."""
    UNCHANGED = "unchanged"
    """The live file says so already."""
    UNCONFIRMED = "unconfirmed"
    """Written, but Envoy cannot be asked: no admin address (a fixed time was waited), or it is not up."""
    LATE = "late"
    """Written, not refused, and not in use within the time: a name that does not resolve, or a busy Envoy."""
    REFUSED = "refused"
    """Envoy does not take it; the last good file is back in place. Keep the old snapshot."""


class Publisher:
    """Owner of the live file. One task may publish at a time; ``finish_removal`` may wait beside it."""

    def __init__(
        self,
        live_dir: Path,
        admin: EnvoyAdmin | None = None,
        *,
        wait_s: float = 5.0,
        blind_wait_s: float = 0.5,
    ) -> None:
        self.path = live_dir / FILE
        self._admin = admin
        self._wait_s = wait_s
        self._blind_wait_s = blind_wait_s
        self._live: tuple[Resource, ...] = ()
        self._generation = 0

    async def publish(self, resources: Sequence[Resource]) -> Publication:
        """Write the union of the live and the wanted clusters and wait, for a bounded time, until Envoy uses
        it.

        The first call after a start writes ``resources`` alone: there are no decisions yet that could need
        others.

        Raises:
            OSError: the directory cannot be written.
        """
        self._generation += 1
        wanted = union(self._live, resources)
        before = await asyncio.to_thread(_read, self.path)
        text = render(wanted)
        if text == before:
            self._live = wanted
            return Publication.UNCHANGED
        state = await self._state()
        await asyncio.to_thread(write, self.path, text)
        outcome = await self._used(wanted, _version(wanted), state)
        if outcome is Publication.REFUSED and before is not None:
            await asyncio.to_thread(write, self.path, before)
        else:
            self._live = wanted
        return outcome

    async def finish_removal(
        self, resources: Sequence[Resource], idle: Callable[[], Awaitable[object]], deadline_s: float
    ) -> bool:
        """Wait for ``idle()`` (no lease needs what goes), at most ``deadline_s``; then write ``resources``
        alone.

        Returns False without writing when a newer publish came meanwhile.

        Raises:
            OSError: the directory cannot be written.
        """
        generation = self._generation
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(idle(), deadline_s)
        if generation != self._generation:
            return False
        wanted = tuple(resources)
        text = render(wanted)
        if text != await asyncio.to_thread(_read, self.path):
            await asyncio.to_thread(write, self.path, text)
        self._live = wanted
        return True

    async def unlisted(self, resources: Sequence[Resource]) -> frozenset[str]:
        """Names of clusters that Envoy cannot send requests to yet; none when it cannot be asked."""
        if self._admin is None:
            return frozenset()
        try:
            return frozenset(resource["name"] for resource in resources) - await self._admin.listed()
        except AdminUnreachable:
            return frozenset()

    def removes(self, resources: Sequence[Resource]) -> bool:
        """Whether something live is not in ``resources``: whether :meth:`finish_removal` has work to do."""
        return render(union(self._live, resources)) != render(resources)

    async def _state(self) -> CdsState | None:
        """Envoy's view before a change; None when it cannot be asked."""
        if self._admin is None:
            return None
        try:
            return await self._admin.cds()
        except AdminUnreachable as error:
            log.info("envoy admin does not answer", extra={"reason": str(error)})
            return None

    async def _used(self, wanted: Sequence[Resource], version: str, before: CdsState | None) -> Publication:
        if self._admin is None or before is None:
            await asyncio.sleep(self._blind_wait_s if self._admin is None else 0)
            return Publication.UNCONFIRMED
        names = {resource["name"] for resource in wanted}
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while loop.time() < end:
            try:
                now = await self._admin.cds()
                if now.rejected > before.rejected:
                    return Publication.REFUSED
                if now.version == version and names <= await self._admin.clusters():
                    return Publication.USED
            except AdminUnreachable:
                return Publication.UNCONFIRMED
            await asyncio.sleep(_POLL_S)
        return Publication.LATE


def union(live: Sequence[Resource], wanted: Sequence[Resource]) -> tuple[Resource, ...]:
    """``wanted``, with the clusters and endpoints of ``live`` that it lacks."""
    old = {resource["name"]: resource for resource in live}
    names = {resource["name"] for resource in wanted}
    merged = [_with_endpoints(resource, old.get(resource["name"])) for resource in wanted]
    return (*merged, *(resource for resource in live if resource["name"] not in names))


def _with_endpoints(new: Resource, old: Resource | None) -> Resource:
    if old is None or old == new or old.get("type") != new.get("type"):
        return new
    missing = [item for address, item in _endpoints(old).items() if address not in _endpoints(new)]
    if not missing:
        return new
    key, assignment = field(new, "load_assignment")
    groups = (assignment or {}).get("endpoints") or []
    assignment = {"cluster_name": new["name"], **(assignment or {})}
    return {**new, key: {**assignment, "endpoints": [*groups, {"lb_endpoints": missing}]}}


def _endpoints(resource: Resource) -> Mapping[str, Any]:
    """Address (as canonical text) -> endpoint."""
    found = {}
    for group in (field(resource, "load_assignment")[1] or {}).get("endpoints") or []:
        for item in field(group, "lb_endpoints")[1] or []:
            address = (item.get("endpoint") or {}).get("address")
            found[json.dumps(address, sort_keys=True)] = item
    return found


def render(resources: Iterable[Resource]) -> str:
    """The file's text: a DiscoveryResponse as JSON, which is YAML; the version is a digest of the content."""
    items = sorted(resources, key=lambda resource: str(resource["name"]))
    return json.dumps({"version_info": _version(items), "resources": items}, indent=1) + "\n"


def _version(resources: Iterable[Resource]) -> str:
    items = sorted(resources, key=lambda resource: str(resource["name"]))
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:16]


def write(path: Path, text: str) -> None:
    """Replace the file in one step: readers see the old or the new one, whole.

    Raises:
        OSError: the directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # Envoy may run as another user
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
