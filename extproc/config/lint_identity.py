"""Does Envoy show us who asks, and wait as long as the queue may take? Part of ``lint.py``."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config.node import Node
from extproc.config.problem import Problem
from extproc.config.schema import Settings
from extproc.config.traffic import longest_wait_s

_MARGIN_S = 5.0


def lint_identity(manager: Node, ext_proc: Node, settings: Settings) -> Iterator[Problem]:
    """One connection manager and its ext_proc filter."""
    forwarded = [
        item.text for item in ext_proc.at("metadata_options", "forwarding_namespaces", "untyped").items()
    ]
    for claim in settings.identity.claims:
        namespace = claim.rpartition(":")[0]
        if namespace not in forwarded:
            yield ext_proc.at("metadata_options").problem(
                f"extproc is not shown the metadata `{namespace}` that `identity.claims` reads; write "
                f"`forwarding_namespaces: {{untyped: [{', '.join([*forwarded, namespace])}]}}`"
            )
    details = manager.at("forward_client_cert_details")
    if settings.identity.client_certificate and details.text != "SANITIZE_SET":
        yield details.problem(
            f"forward_client_cert_details {details.text or 'SANITIZE (the default)'} does not vouch for client "
            "certificates, which `identity.client_certificate` believes; write SANITIZE_SET"
        )
    most = ext_proc.at("max_message_timeout").seconds
    wanted = longest_wait_s(settings) + _MARGIN_S
    if most and most < wanted:
        yield ext_proc.at("max_message_timeout").problem(
            f"requests may wait for {wanted - _MARGIN_S:g} s in a queue, but Envoy gives up after {most:g} s; write "
            f"`max_message_timeout: {wanted:g}s`, and the route's `idle_timeout` longer"
        )
