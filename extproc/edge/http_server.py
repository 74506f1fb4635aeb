"""An aiohttp application on an address of ours."""

from __future__ import annotations

from aiohttp import web

from extproc.config.address import parse_address


class HttpServer:
    """Owns the socket of one application. ``address`` as in the configuration: ``HOST:PORT`` or ``unix:PATH``."""

    def __init__(self, address: str, app: web.Application) -> None:
        self._address = parse_address(address)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Bind and serve. Raises OSError when the address cannot be bound."""
        await self._runner.setup()
        where = self._address
        site: web.BaseSite
        if where.path:
            site = web.UnixSite(self._runner, where.path)
        else:
            site = web.TCPSite(self._runner, where.host, where.port)
        await site.start()

    async def stop(self) -> None:
        """Close the socket and its connections."""
        await self._runner.cleanup()
