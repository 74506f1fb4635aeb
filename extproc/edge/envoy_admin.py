"""Questions to Envoy's admin interface: which published clusters it uses, what it took or refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

_VERSION = re.compile(r'^cluster_manager\.cds\.version_text: "(.*)"$', re.MULTILINE)
_REJECTED = re.compile(r"^cluster_manager\.cds\.update_(?:rejected|failure): (\d+)$", re.MULTILINE)
"""``failure``: the file did not become a message at all, as with an unknown type of extension."""
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class AdminUnreachable(Exception):
    """Envoy's admin does not answer: Envoy is not running, or the address is wrong."""


@dataclass(slots=True, frozen=True)
class CdsState:
    """What Envoy says of the file it gets from us."""

    version: str
    """``version_info`` of the last file it took; empty before the first."""
    rejected: int
    """Files it has refused since it started."""


class EnvoyAdmin:
    """One Envoy's admin: ``unix:/path``, ``http://host:port`` or ``host:port``. Close it after use."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._unix = address.removeprefix("unix:") if address.startswith("unix:") else None
        if self._unix is not None:
            self._base = "http://envoy"
        else:
            self._base = address.rstrip("/") if "://" in address else f"http://{address}"
        self._session: aiohttp.ClientSession | None = None

    async def clusters(self) -> frozenset[str]:
        """Names of the clusters that came from us and are in use in their newest form (none still warming).

        Raises:
            AdminUnreachable: no answer.
        """
        active = await self._dump("dynamic_active_clusters")
        return active - await self._dump("dynamic_warming_clusters") if active else active

    async def listed(self) -> frozenset[str]:
        """Names of the clusters that came from us and that requests can be sent to, in whatever form.

        Raises:
            AdminUnreachable: no answer.
        """
        return await self._dump("dynamic_active_clusters")

    async def cds(self) -> CdsState:
        """Version and rejections of the published file.

        Raises:
            AdminUnreachable: no answer.
        """
        query = {"filter": r"^cluster_manager\.cds\.(version_text|update_rejected|update_failure)$"}
        _, text = await self._get("/stats", query)
        version = _VERSION.search(text)
        return CdsState(version[1] if version else "", sum(map(int, _REJECTED.findall(text))))

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _dump(self, resource: str) -> frozenset[str]:
        status, text = await self._get("/config_dump", {"resource": resource, "mask": "cluster.name"})
        if status != 200:
            return frozenset()
        return _names(text)

    async def _get(self, path: str, query: dict[str, str]) -> tuple[int, str]:
        if self._session is None:
            connector = aiohttp.UnixConnector(self._unix) if self._unix is not None else None
            self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        try:
            async with self._session.get(self._base + path, params=query) as reply:
                return reply.status, await reply.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AdminUnreachable(f"{self.address}: {error or type(error).__name__}") from error


def _names(text: str) -> frozenset[str]:
    configs: list[dict[str, Any]] = json.loads(text).get("configs", [])
    return frozenset(entry["cluster"]["name"] for entry in configs if "name" in entry.get("cluster", {}))
