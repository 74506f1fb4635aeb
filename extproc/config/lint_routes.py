"""Lint of an Envoy bootstrap: the routes of a connection manager with an ext_proc filter."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.config.lint_roles import GUARD_ROLE, role
from extproc.config.node import Node
from extproc.config.problem import Problem
from extproc.config.schema import Settings
from extproc.config.schema.base import show_bytes

_DEFAULT_BUFFER = 1024 * 1024


def lint_routes(root: Node, manager: Node, settings: Settings) -> Iterator[Problem]:
    """Whether routes do what extproc decides, and leave bodies and streams alone."""
    config = manager.at("route_config")
    if not config:
        yield manager.at("rds").problem("routes come from RDS, so they are not checked", fatal=False)
        return
    if root.at("dynamic_resources", "cds_config") and config.at("validate_clusters").value is not False:
        yield config.at("validate_clusters").problem(
            "engine clusters come by CDS after the routes are read; write `validate_clusters: false`"
        )
    for host in config.at("virtual_hosts").items():
        for route in host.at("routes").items():
            if route.at("route") and not _without_ext_proc(route):
                yield from _route(root, manager, host, route, settings)


def _without_ext_proc(route: Node) -> bool:
    return any(
        node.at("disabled").true for node in route.at("typed_per_filter_config").typed(".ExtProcPerRoute")
    )


def _route(root: Node, manager: Node, host: Node, route: Node, settings: Settings) -> Iterator[Problem]:
    action = route.at("route")
    groups = next(action.at("inline_cluster_specifier_plugin").typed(".PriorityGroupClusterSpecifier"), None)
    if groups is not None:
        yield from _priority_groups(manager, host, action, groups)
    elif action.at("cluster_header").text.lower() != "x-gateway-cluster":
        yield action.problem(
            "this route goes to a cluster of its own, whatever extproc decides; use the priority_group "
            "specifier of "
            "envoy/envoy.yaml, or `cluster_header: x-gateway-cluster`",
            fatal=False,
        )
    timeout = action.at("timeout")
    if timeout.seconds is None or 0 < timeout.seconds < 600:
        yield timeout.problem(
            f"timeout {timeout.text or '15s (the default)'} cuts generations short; write `timeout: 0s`"
        )
    if not action.at("idle_timeout") and manager.at("stream_idle_timeout").text != "0s":
        idle = manager.at("stream_idle_timeout")
        yield action.problem(
            f"requests that are silent for {idle.text or '5 minutes (the default)'}, also while they wait, "
            "get a 504; "
            "write an `idle_timeout` above the longest wait, as in `idle_timeout: 660s`",
            fatal=False,
        )
    yield from _body_limit(manager, host, route, settings)


def _priority_groups(manager: Node, host: Node, action: Node, groups: Node) -> Iterator[Problem]:
    namespace = groups.at("override_metadata_namespace")
    if namespace.text != "envoy.lb":
        yield namespace.problem(
            "the priority_group specifier does not read what extproc decides; write "
            "`override_metadata_namespace: envoy.lb`"
        )
    for ext_proc in manager.at("http_filters").typed(".ExternalProcessor"):
        if role(ext_proc) == GUARD_ROLE:
            continue  # it decides nothing
        allowed = ext_proc.at("metadata_options", "receiving_namespaces", "untyped")
        if "envoy.lb" not in [item.text for item in allowed.items()]:
            yield (allowed or ext_proc.at("metadata_options")).problem(
                "Envoy drops the endpoints that extproc names; write "
                "`metadata_options: {receiving_namespaces: {untyped: [envoy.lb, gateway]}}`"
            )
    retry = action.at("retry_policy") or host.at("retry_policy")
    if not retry:
        yield action.problem(
            "without a retry_policy a dead first choice is an error for the client; add the one of "
            "envoy/envoy.yaml",
            fatal=False,
        )
    elif not retry.at("refresh_cluster_on_retry").true:
        yield retry.at("refresh_cluster_on_retry").problem(
            "retries go to the cluster that has just failed; write `refresh_cluster_on_retry: true`"
        )
    if "retriable-status-codes" in retry.at("retry_on").text:
        yield retry.at("retry_on").problem(
            "busy answers (503) are retried however many there are; take `retriable-status-codes` out: extproc asks for "
            "such retries while the pool's retry budget lasts",
            fatal=False,
        )


def _body_limit(manager: Node, host: Node, route: Node, settings: Settings) -> Iterator[Problem]:
    wanted = settings.limits.max_body_bytes
    listener = Node(manager.document, manager.path[:3], _down(manager.document.data, manager.path[:3]))
    limit = next(
        (
            found
            for found in (
                route.at("request_body_buffer_limit"),
                host.at("request_body_buffer_limit"),
                listener.at("per_connection_buffer_limit_bytes"),
            )
            if found
        ),
        route.at("request_body_buffer_limit"),
    )
    most = limit.number if limit.number is not None else _DEFAULT_BUFFER
    if most < wanted:
        yield limit.problem(
            f"request bodies above {show_bytes(int(most))} get a 413 here, but `limits.max_body_bytes` is "
            f"{show_bytes(wanted)}; write `request_body_buffer_limit: {wanted}` on the route"
        )


def _down(data: object, path: tuple[str | int, ...]) -> object:
    for step in path:
        if isinstance(data, dict):
            data = data.get(str(step))
        elif isinstance(data, list) and isinstance(step, int):
            data = data[step]
    return data
