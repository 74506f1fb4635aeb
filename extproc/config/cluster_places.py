"""Where clusters and endpoints stand in a file, with the paths that problems need."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

from extproc.config.envoy_message import did_you_mean, field
from extproc.config.problem import ConfigError
from extproc.config.yaml_source import Document, NodePath


def locate(document: Document) -> tuple[NodePath, list[Any], bool]:
    """Where the list of clusters stands, the list, and whether it is for us to publish."""
    data = document.data
    static = data.get("static_resources")
    places: list[tuple[NodePath, object, bool]] = [
        (("resources",), data.get("resources"), True),
        (("clusters",), data.get("clusters"), True),
        (
            ("static_resources", "clusters"),
            static.get("clusters") if isinstance(static, dict) else None,
            False,
        ),
    ]
    for path, value, published in places:
        if value is None:
            continue
        if not isinstance(value, list):
            raise ConfigError(
                [document.problem(path, "must be a list of clusters (lines that begin with `- `)")]
            )
        if published:
            known = [str(path[0]), "version_info", "type_url", "nonce"]
            unknown = [key for key in data if key not in known and not key.startswith("x-")]
            if unknown:
                raise ConfigError(
                    [
                        document.problem((key,), f"unknown key `{key}`{did_you_mean(key, known)}")
                        for key in unknown
                    ]
                )
        return path, value, published
    if any(key in data for key in ("resources", "clusters", "static_resources")) or not data:
        return ("resources",), [], static is None
    raise ConfigError([document.problem((), "no clusters here; write them as a list under `resources:`")])


@dataclass(slots=True)
class Places:
    """The endpoints of a load assignment, as message and as data, with their paths."""

    document: Document
    path: NodePath
    data: dict[str, Any]
    assignment: Any
    skip: int = 0
    """Leading steps that are not in the document."""

    def endpoints(self) -> list[tuple[str, Any, Any, NodePath]]:
        """``(locality, message, data, path)``."""
        found = []
        key, assignment = field(self.data, "load_assignment")
        _, groups = field(assignment, "endpoints")
        for i, group in enumerate(self.assignment.endpoints):
            parts = (group.locality.region, group.locality.zone, group.locality.sub_zone)
            locality = "/".join(part for part in parts if part)
            inner, items = field(groups[i], "lb_endpoints")
            for j, endpoint in enumerate(group.lb_endpoints):
                steps: NodePath = (key, "endpoints", i, inner, j)
                found.append((locality, endpoint, items[j], (*self.path, *steps[self.skip :])))
        return found


def is_ip(host: str) -> bool:
    """Whether ``host`` is an IP address, of either family."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_port(host: str, port: int) -> str:
    """``host:port``, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
