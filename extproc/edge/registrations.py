"""What operators do to the fleet while it serves: register, remove, drain, undrain.

Rules of this file:

- a registration is a cluster in ``registered.yaml`` of the state folder, taken over by the same road as an edit of
  ``clusters.yaml``: checked, published to Envoy, used when Envoy uses it. What is refused is not kept;
- only what was registered can be removed: what stands in a file comes back with the file. Removal ends like that of a
  file: no new requests, running ones end or meet the deadline, then Envoy forgets the cluster;
- a drain is a word in ``drained.json`` of the state folder; both outlive a restart;
- an endpoint is named by its cluster, by ``cluster/host:port`` or by ``host:port``; a cluster means all its endpoints;
- one change at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from extproc.config.cluster_metadata import KEYS
from extproc.config.clusters import read_clusters
from extproc.config.problem import ConfigError, Problem
from extproc.config.registered import FILE, cluster_name, cluster_of, stored
from extproc.config.yaml_source import Document
from extproc.edge.publisher import write
from extproc.fleet.endpoint import Endpoint
from extproc.fleet.fleet import Fleet

log = logging.getLogger(__name__)

DRAINED = "drained.json"
MOST = 1000
"""Registered endpoints at once."""
_POLL_S = 0.05


class Refused(Exception):
    """The operation cannot be done; ``status`` is HTTP's, the text is for people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Reload(Protocol):
    """Take over the files; returns what is wrong."""

    def __call__(self, *, allow_removals: bool = False) -> Awaitable[tuple[Problem, ...]]:
        """See :meth:`extproc.edge.live_config.LiveConfig.reload`."""


class Registrations:
    """The operations. ``published``: whether clusters reach Envoy by a file (not so for those of a bootstrap)."""

    def __init__(
        self,
        state_dir: Path,
        fleet: Fleet,
        reload: Reload,
        *,
        published: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = state_dir / FILE
        self._drained = state_dir / DRAINED
        self._fleet = fleet
        self._reload = reload
        self._published = published
        self._clock = clock
        self._lock = asyncio.Lock()

    def restore(self) -> None:
        """Take over the drains of an earlier process. A file that cannot be read is logged."""
        try:
            keys = json.loads(self._drained.read_text()) if self._drained.exists() else []
            if not isinstance(keys, list):
                raise ValueError("no list")
        except (OSError, ValueError) as error:
            log.error("drained endpoints not known", extra={"file": str(self._drained), "reason": str(error)})
            return
        self._fleet.drained.update(str(key) for key in keys)

    async def register(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Add an endpoint. ``asked``: ``address`` (``host:port``), optional ``name``, and the keys of the metadata in
        ``clusters.yaml`` (``pool`` must be there).

        Raises:
            Refused: it is no endpoint, is there already, or Envoy does not take it.
        """
        metadata = dict(asked)
        address, name = metadata.pop("address", None), metadata.pop("name", None)
        host, port = _host_port(address)
        unknown = sorted(metadata.keys() - KEYS)
        if unknown:
            known = ", ".join(sorted(KEYS))
            raise Refused(400, f"unknown key `{str(unknown[0])[:60]}`; there are address, name, {known}")
        if not metadata.get("pool"):
            raise Refused(400, "an endpoint needs a `pool`")
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 200):
            raise Refused(400, "`name` must be a text of at most 200 characters")
        if not self._published():
            raise Refused(409, "the clusters stand in Envoy's bootstrap, to which nothing can be added")
        async with self._lock:
            items = await self._stored()
            cluster = name or cluster_name(str(address))
            if any(endpoint.spec.cluster == cluster for endpoint in self._fleet.endpoints.values()):
                raise Refused(409, f"there is a cluster `{cluster}` already")
            if len(items) >= MOST:
                raise Refused(409, f"{MOST} endpoints are registered, and there may be no more")
            new = cluster_of(cluster, host, port, metadata)
            try:
                read_clusters(Document("the endpoint", {"resources": [new]}), self._file.parent)
            except ConfigError as error:
                raise Refused(400, "; ".join(problem.message for problem in error.problems)[:2000]) from error
            await self._take([*(item for item in items if item.get("name") != cluster), new], items)
        return {"registered": cluster, "endpoints": self._report(self._named(cluster))}

    async def remove(self, name: str) -> dict[str, Any]:
        """Forget a registered endpoint: no new requests at once; Envoy's part follows when its requests have ended.

        Raises:
            Refused: it is not known, or stands in a file.
        """
        async with self._lock:
            items = await self._stored()
            clusters = {endpoint.spec.cluster for endpoint in self._find(name)} or {name}
            gone = [item for item in items if item.get("name") in clusters]
            if not gone:
                if any(endpoint.spec.cluster in clusters for endpoint in self._fleet.endpoints.values()):
                    raise Refused(
                        409, f"`{name}` stands in the clusters file: take it out there, or drain it"
                    )
                raise Refused(404, f"no endpoint `{name}`")
            leaving = [endpoint for cluster in clusters for endpoint in self._find(cluster)]
            kept = [item for item in items if item.get("name") not in clusters]
            await self._take(kept, items, allow_removals=True)
            self._fleet.drained.difference_update(endpoint.key for endpoint in leaving)
            await self._keep_drained()
        return {"removed": sorted(clusters), "endpoints": self._report(leaving)}

    async def drain(self, name: str, wait_s: float = 0.0) -> dict[str, Any]:
        """No new requests; returns when what runs there has ended, or after ``wait_s``.

        Raises:
            Refused: it is not known.
        """
        endpoints = self._named(name)
        async with self._lock:
            for endpoint in endpoints:
                self._fleet.drain(endpoint)
            await self._keep_drained()
        log.info("drained by hand", extra={"endpoints": [endpoint.key for endpoint in endpoints]})
        deadline = self._clock() + wait_s
        while any(endpoint.leases for endpoint in endpoints) and self._clock() < deadline:
            await asyncio.sleep(_POLL_S)
        return {
            "idle": not any(endpoint.leases for endpoint in endpoints),
            "endpoints": self._report(endpoints),
        }

    async def undrain(self, name: str) -> dict[str, Any]:
        """Give it requests again, once it is ready.

        Raises:
            Refused: it is not known, or its file says that it is draining.
        """
        endpoints = self._named(name)
        for endpoint in endpoints:
            if endpoint.spec.draining:
                raise Refused(409, f"`{endpoint.key}` is draining by its file: change `state` there")
        async with self._lock:
            for endpoint in endpoints:
                self._fleet.undrain(endpoint)
            await self._keep_drained()
        log.info("undrained by hand", extra={"endpoints": [endpoint.key for endpoint in endpoints]})
        return {"endpoints": self._report(endpoints)}

    def _find(self, name: str) -> list[Endpoint]:
        return [
            endpoint
            for endpoint in self._fleet.endpoints.values()
            if name in (endpoint.key, endpoint.spec.cluster, endpoint.spec.address)
        ]

    def _named(self, name: str) -> list[Endpoint]:
        found = self._find(name)
        if not found:
            raise Refused(404, f"no endpoint `{name[:200]}`")
        return found

    def _report(self, endpoints: list[Endpoint]) -> list[dict[str, Any]]:
        return [
            {
                "endpoint": endpoint.key,
                "pool": endpoint.spec.pool,
                "lifecycle": "gone" if endpoint.removed else endpoint.lifecycle.value,
                "leases": endpoint.leases,
            }
            for endpoint in endpoints
        ]

    async def _stored(self) -> list[dict[str, Any]]:
        try:
            return await asyncio.to_thread(stored, self._file)
        except ConfigError as error:
            raise Refused(500, str(error.problems[0])) from error

    async def _take(
        self, items: list[dict[str, Any]], before: list[dict[str, Any]], *, allow_removals: bool = False
    ) -> None:
        await self._write(self._file, _text(items))
        problems = await self._reload(allow_removals=allow_removals)
        if problems:
            await self._write(self._file, _text(before))
            raise Refused(422, "; ".join(str(problem) for problem in problems)[:2000])

    async def _keep_drained(self) -> None:
        drained = self._fleet.drained
        if len(drained) > MOST:
            drained.intersection_update(self._fleet.endpoints)
        await self._write(self._drained, json.dumps(sorted(drained)) + "\n")

    async def _write(self, path: Path, text: str) -> None:
        try:
            await asyncio.to_thread(write, path, text)
        except OSError as error:
            raise Refused(500, f"{path} cannot be written: {error.strerror}") from error


def _text(items: list[dict[str, Any]]) -> str:
    head = (
        "# Endpoints registered at run time. Written by extproc: use `extproc fleet register` and `remove`.\n"
    )
    return head + yaml.safe_dump({"resources": items}, sort_keys=False)


def _host_port(address: object) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not host
        or len(host) > 253
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port[:6]) < 65536
    ):
        raise Refused(400, "`address` must be HOST:PORT")
    return host, int(port)
