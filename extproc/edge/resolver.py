"""DNS names of engines -> addresses, asked again every few seconds.

Rules of this file:

- a name that cannot be resolved keeps its last addresses, as Envoy's STRICT_DNS does;
- both must look at the same address family, so the cluster's ``dns_lookup_family`` rules here too;
- questions run in threads (``getaddrinfo``), a few at a time, each bounded in time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping

from extproc.config.clusters import MAX_ADDRESSES, DnsName

log = logging.getLogger(__name__)

Place = tuple[str, int]
Lookup = Callable[[str, int], Awaitable[Iterable[tuple[int, str]]]]
"""``(host, port)`` -> ``(address family, ip)`` pairs."""


class Resolver:
    """Addresses of a changing set of names."""

    def __init__(
        self,
        names: Iterable[DnsName] = (),
        *,
        timeout_s: float = 2.0,
        at_once: int = 8,
        lookup: Lookup | None = None,
    ) -> None:
        self._names = {(name.host, name.port): name for name in names}
        self._addresses: dict[Place, tuple[str, ...]] = {}
        self._failing: set[Place] = set()
        self._timeout_s = timeout_s
        self._gate = asyncio.Semaphore(at_once)
        self._lookup = lookup or _getaddrinfo

    @property
    def addresses(self) -> Mapping[Place, tuple[str, ...]]:
        """Last good addresses of every name, sorted. Give them to :meth:`Clusters.expand`."""
        return dict(self._addresses)

    @property
    def failing(self) -> frozenset[Place]:
        """Names whose last question failed."""
        return frozenset(self._failing)

    def watch(self, names: Iterable[DnsName]) -> None:
        """From now on resolve these names and no others."""
        self._names = {(name.host, name.port): name for name in names}
        self._addresses = {place: ips for place, ips in self._addresses.items() if place in self._names}
        self._failing &= self._names.keys()

    async def refresh(self) -> bool:
        """Ask for all names once; True when any address changed."""
        before = dict(self._addresses)
        await asyncio.gather(*(self._ask(place, name) for place, name in list(self._names.items())))
        return self._addresses != before

    async def run(self, changed: Callable[[], Awaitable[object]], interval_s: float = 5.0) -> None:
        """Refresh for ever, calling ``changed`` when addresses did. Ends only by cancellation."""
        while True:
            await asyncio.sleep(interval_s)
            if self._names and await self.refresh():
                await changed()

    async def _ask(self, place: Place, name: DnsName) -> None:
        try:
            async with self._gate:
                found = await asyncio.wait_for(self._lookup(*place), self._timeout_s)
        except (OSError, TimeoutError, UnicodeError) as error:
            if place not in self._failing:
                log.warning("name not resolved", extra={"host": place[0], "reason": str(error) or "timeout"})
            self._failing.add(place)
            return
        self._failing.discard(place)
        ips = choose(found, name.family)
        if ips and place in self._names:
            self._addresses[place] = ips


def choose(found: Iterable[tuple[int, str]], family: str) -> tuple[str, ...]:
    """The addresses that Envoy would use under ``dns_lookup_family``, sorted, capped."""
    v4 = sorted({ip for kind, ip in found if kind == socket.AF_INET})
    v6 = sorted({ip for kind, ip in found if kind == socket.AF_INET6})
    chosen = {
        "V4_ONLY": v4,
        "V6_ONLY": v6,
        "V4_PREFERRED": v4 or v6,
        "ALL": v4 + v6,
    }.get(family, v6 or v4)
    return tuple(chosen[:MAX_ADDRESSES])


async def _getaddrinfo(host: str, port: int) -> list[tuple[int, str]]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(int(kind), str(address[0])) for kind, _, _, _, address in found]
