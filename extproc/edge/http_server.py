"""An aiohttp application on an address of ours."""

from __future__ import annotations

import asyncio
import os
import socket

from aiohttp import web

from extproc.config.address import parse_address

_BACKLOG = 128
_ACCEPTED_AT_ONCE = 1
"""asyncio takes its ``backlog`` also for how often it accepts in a row, and where no file descriptor is left for that it
logs and tries again for each of them: with the usual 128, hundreds of megabytes of log a minute."""


class HttpServer:
    """Owns the socket of one application. ``address`` as in the configuration: ``HOST:PORT`` or ``unix:PATH``."""

    def __init__(self, address: str, app: web.Application) -> None:
        self._address = parse_address(address)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Bind and serve. Raises OSError when the address cannot be bound."""
        await self._runner.setup()
        where = self._address
        if where.path:
            await web.UnixSite(self._runner, where.path, backlog=_ACCEPTED_AT_ONCE).start()
        else:
            await web.TCPSite(self._runner, where.host, where.port, backlog=_ACCEPTED_AT_ONCE).start()
        for site in self._runner.sites:
            server = site._server
            assert isinstance(server, asyncio.Server)
            for listening in server.sockets:
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(_BACKLOG)

    async def stop(self) -> None:
        """Close the socket and its connections."""
        await self._runner.cleanup()
