"""What an ext_proc filter of a bootstrap is to extproc."""

from __future__ import annotations

from extproc.config.node import Node

GUARD_ROLE, SHADOW_ROLE = "guard", "shadow"


def role(ext_proc: Node) -> str:
    """As the filter says in its gRPC metadata; empty for the one that decides requests of clients."""
    for entry in ext_proc.at("grpc_service", "initial_metadata").items():
        if entry.at("key").text == "x-extproc-role":
            return entry.at("value").text
    return ""
