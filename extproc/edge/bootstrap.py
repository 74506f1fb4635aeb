"""A concrete Envoy bootstrap from the template ``envoy/envoy.yaml``: only addresses and paths change.

The template stays valid by itself; the demo and the tests run copies of it on other ports and paths.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def render(
    template: str | Path,
    *,
    port: int,
    admin_port: int,
    extproc_address: str,
    live_dir: str | Path | None,
    host: str = "127.0.0.1",
    change: Callable[[dict[str, Any]], None] | None = None,
) -> str:
    """The text of a bootstrap.

    ``extproc_address``: ``unix:/path`` or ``host:port``. ``live_dir``: where extproc publishes
    ``clusters.yaml``; None leaves a template with static clusters as it is. Envoy's admin listens on
    ``127.0.0.1:admin_port``. ``change`` may edit the parsed document last.

    Raises:
        ValueError: the template has no listener or no cluster named ``extproc``.
    """
    document = yaml.safe_load(Path(template).read_text(encoding="utf-8"))
    static = document.get("static_resources") or {}
    if not static.get("listeners"):
        raise ValueError(f"{template}: no listener under static_resources")
    static["listeners"][0]["address"] = socket_address(host, port)
    document["admin"] = {"address": socket_address("127.0.0.1", admin_port)}
    processor = next((item for item in static.get("clusters") or [] if item.get("name") == "extproc"), None)
    if processor is None:
        raise ValueError(f"{template}: no cluster named extproc under static_resources")
    _point(processor, extproc_address)
    if live_dir is not None:
        source = document["dynamic_resources"]["cds_config"]["path_config_source"]
        source["path"] = str(Path(live_dir) / "clusters.yaml")
        source["watched_directory"] = {"path": str(live_dir)}
        _move_shadow(static, f"{live_dir}/shadow.sock")
    if change is not None:
        change(document)
    return dump(document)


def connection_manager(document: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of the first listener: where routes, filters and logs are."""
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    manager: dict[str, Any] = chain["filters"][0]["typed_config"]
    return manager


def socket_address(host: str, port: int) -> dict[str, Any]:
    """Envoy's way to write ``host:port``."""
    return {"socket_address": {"address": host, "port_value": port}}


def dump(document: dict[str, Any]) -> str:
    """YAML without aliases (Envoy's own order of keys does not matter)."""
    return yaml.dump(document, Dumper=_Plain, sort_keys=False, width=1000)


def _move_shadow(static: dict[str, Any], path: str) -> None:
    """Put the socket by which Envoy calls its own shadow listener at ``path``."""
    for listener in static["listeners"]:
        if listener.get("name") == "shadow":
            listener["address"] = {"pipe": {"path": path}}
    for cluster in static["clusters"]:
        if cluster.get("name") == "shadow":
            _point(cluster, f"unix:{path}")


def _point(cluster: dict[str, Any], address: str) -> None:
    """Make the extproc cluster's only endpoint ``address``."""
    if address.startswith("unix:"):
        place: dict[str, Any] = {"pipe": {"path": address.removeprefix("unix:")}}
    else:
        host, _, port = address.rpartition(":")
        place = socket_address(host.strip("[]"), int(port))
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": place}}]}]


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
