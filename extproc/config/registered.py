"""Endpoints registered at run time: one more file of Envoy clusters, written by us, in the state folder.

Rules of this file:

- it has the shape of ``clusters.yaml``, one cluster an endpoint, and is read by the same code;
- the edited file rules: a registered cluster of a name that stands there too is left out, with a warning;
- a registered file that cannot be read costs its endpoints, never the start of the gateway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from extproc.config.cluster_metadata import NAMESPACE
from extproc.config.cluster_places import is_ip
from extproc.config.clusters import Clusters, read_clusters
from extproc.config.problem import ConfigError, Problem
from extproc.config.yaml_source import Document, read_file

FILE = "registered.yaml"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def cluster_name(address: str) -> str:
    """The cluster of a registered ``host:port``, when it is given no name."""
    return "registered-" + _NOT_IN_NAMES.sub("-", address).strip("-")


def cluster_of(name: str, host: str, port: int, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """An Envoy cluster of one endpoint, as a person would write it. ``metadata``: keys as in ``clusters.yaml``."""
    address = {"socket_address": {"address": host, "port_value": port}}
    return {
        "name": name,
        "type": "STATIC" if is_ip(host) else "STRICT_DNS",
        "metadata": {"filter_metadata": {NAMESPACE: dict(metadata)}},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }


def with_registered(clusters: Clusters, state_dir: Path) -> Clusters:
    """``clusters`` and those of the registered file, as one."""
    path = state_dir / FILE
    if not path.exists():
        return clusters
    try:
        items = stored(path)
        kept = [item for item in items if item.get("name") not in clusters.names]
        extra = read_clusters(Document(FILE, {"resources": kept}), state_dir)
    except ConfigError as error:
        lost = [replace(problem, fatal=False) for problem in error.problems]
        return replace(clusters, warnings=(*clusters.warnings, *lost))
    hidden = [
        Problem(
            FILE,
            0,
            f"cluster `{item.get('name')}` was registered and stands in the clusters file too, which rules; "
            "`extproc fleet remove` forgets the registration",
            fatal=False,
        )
        for item in items
        if item.get("name") in clusters.names
    ]
    return Clusters(
        fixed=(*clusters.fixed, *extra.fixed),
        dns=(*clusters.dns, *extra.dns),
        names={**clusters.names, **extra.names},
        resources=(*clusters.resources, *extra.resources),
        warnings=(*clusters.warnings, *extra.warnings, *hidden),
        files=clusters.files,
        tls={**clusters.tls, **extra.tls},
    )


def stored(path: Path) -> list[dict[str, Any]]:
    """The registered clusters, as they were written; none without a file.

    Raises:
        ConfigError: the file is not what we write.
    """
    if not path.exists():
        return []
    document = read_file(path, FILE)
    items = document.data.get("resources")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError([Problem(FILE, 0, "the registered endpoints cannot be read; remove this file")])
    return items
