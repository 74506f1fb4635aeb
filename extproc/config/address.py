"""An address to listen on or to call, as written in the configuration: ``unix:PATH`` or ``HOST:PORT``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MAX_SOCKET_PATH = 107
"""Bytes in the path of a Unix socket on Linux (sockaddr_un has 108, one of them the closing zero)."""


@dataclass(slots=True, frozen=True)
class Address:
    """Either ``path`` of a Unix socket, or ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it: a Unix socket or a loopback address."""
        return bool(self.path) or is_loopback(self.host)

    def __str__(self) -> str:
        """The written form, which gRPC takes as it is."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is localhost or a loopback IP. Other names are not asked of DNS and count as
    remote."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """Read ``unix:PATH`` or ``HOST:PORT`` (IPv6 in brackets).

    Raises:
        ValueError: with what to write instead.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        if not path:
            raise ValueError("the socket's path is missing; write `unix:envoy/live/extproc.sock`")
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"`{text}` is not an address; write IPv6 in brackets, as in `[::1]:9002`")
    if not colon or not host:
        raise ValueError(f"`{text}` is not an address; write `HOST:PORT` or `unix:PATH`")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"`{port}` is not a port; write a number from 1 to 65535")
    return Address(host=host, port=int(port))
