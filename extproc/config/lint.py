"""Does an Envoy bootstrap work with us? Envoy accepts all of this; requests are lost or let through later.

One function a subject, in the order of a request's way: connection manager, ext_proc filter, access log here;
routes in ``lint_routes.py``, clusters in ``lint_clusters.py``. Each yields problems at the lines of the
bootstrap. The defaults named are Envoy 1.40's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from extproc.config.lint_clusters import lint_extproc_cluster, lint_files
from extproc.config.lint_identity import lint_identity
from extproc.config.lint_roles import GUARD_ROLE, SHADOW_ROLE, role
from extproc.config.lint_routes import lint_routes
from extproc.config.node import Node
from extproc.config.problem import Problem
from extproc.config.schema import Settings
from extproc.config.yaml_source import Document

_REQUEST_ID = "x-gateway-request-id"
_WHOLE_BODY = ("BUFFERED", "FULL_DUPLEX_STREAMED")


def lint(document: Document, settings: Settings, published: Collection[str] = ()) -> list[Problem]:
    """Everything in the bootstrap that loses requests, lets them pass unjudged, or blinds extproc.

    ``published``: names of the clusters that Envoy gets from the clusters file.
    """
    root = Node(document, (), document.data)
    managers = [
        manager
        for manager in root.typed(".HttpConnectionManager")
        if any(True for _ in manager.at("http_filters").typed(".ExternalProcessor"))
    ]
    if not managers:
        if root.at("dynamic_resources", "lds_config"):
            return [
                root.at("dynamic_resources", "lds_config").problem(
                    "listeners come from a management server, so their ext_proc filter is not checked",
                    fatal=False,
                )
            ]
        return [
            root.at("static_resources", "listeners").problem(
                "no listener has an ext_proc filter, so no request reaches extproc; add "
                "`envoy.filters.http.ext_proc` "
                "to `http_filters` before the router, as in envoy/envoy.yaml"
            )
        ]
    problems = [*lint_files(root, settings)]
    for manager in managers:
        shadow = any(
            role(found) == SHADOW_ROLE for found in manager.at("http_filters").typed(".ExternalProcessor")
        )
        problems += _shadow(root, manager) if shadow else _manager(manager)
        problems += _access_log(manager, settings)
        for ext_proc in manager.at("http_filters").typed(".ExternalProcessor"):
            problems += _ext_proc(ext_proc, settings)
            if not role(ext_proc):
                problems += lint_identity(manager, ext_proc, settings)
        problems += lint_routes(root, manager, settings)
    for name in sorted(_extproc_clusters(managers)):
        problems += lint_extproc_cluster(root, name, settings, published)
    return problems


def _shadow(root: Node, manager: Node) -> Iterator[Problem]:
    """The shadow listener takes the ids it is given: nobody but Envoy may reach it."""
    listener = root.at("static_resources", "listeners").items()[int(manager.path[2])]
    if not listener.at("address", "pipe"):
        yield listener.at("address").problem(
            "clients could reach the shadow listener and send requests under ids of others; write "
            "`address: {pipe: {path: live/shadow.sock}}`"
        )


def _manager(manager: Node) -> Iterator[Problem]:
    early = manager.at("early_header_mutation_extensions")
    mutations = [
        mutation for found in early.typed(".HeaderMutation") for mutation in found.at("mutations").items()
    ]
    prefixes = [mutation.at("remove_on_match", "key_matcher", "prefix").text for mutation in mutations]
    if not any(prefix and "x-gateway-".startswith(prefix.lower()) for prefix in prefixes):
        yield early.problem(
            "clients can send our control headers (x-gateway-…); add an early_header_mutation with "
            "`remove_on_match: {key_matcher: {prefix: x-gateway-}}`"
        )
    if not any(mutation.at("append", "header", "key").text.lower() == _REQUEST_ID for mutation in mutations):
        yield early.problem(
            f"requests get no {_REQUEST_ID}, so what became of them cannot be known; add to the "
            "early_header_mutation "
            f'`append: {{header: {{key: {_REQUEST_ID}, value: "%UNIQUE_ID%"}}, '
            "append_action: OVERWRITE_IF_EXISTS_OR_ADD}`"
        )


def _ext_proc(ext_proc: Node, settings: Settings) -> Iterator[Problem]:
    if role(ext_proc) == GUARD_ROLE:
        return
    mode = ext_proc.at("processing_mode")
    if mode.at("request_header_mode").text == "SKIP":
        yield mode.at("request_header_mode").problem(
            "request_header_mode SKIP sends requests on before extproc has decided; write SEND"
        )
    body = mode.at("request_body_mode")
    if body.text not in _WHOLE_BODY:
        yield body.problem(
            f"request_body_mode {body.text or 'NONE (the default)'} does not show extproc the whole body, "
            "so it cannot "
            "read model and prompt; write BUFFERED"
        )
    if mode.at("response_body_mode").text not in ("", "NONE"):
        yield mode.at("response_body_mode").problem(
            f"response_body_mode {mode.at('response_body_mode').text} sends every token through extproc, "
            "which does not "
            "read them; write NONE",
            fatal=False,
        )
    timeout = ext_proc.at("message_timeout")
    if body.text != "FULL_DUPLEX_STREAMED" and (timeout.seconds or 0.2) < 1:
        yield timeout.problem(
            f"message_timeout {timeout.text or '0.2s (the default)'} turns a short pause of extproc into "
            "504s; write 2s"
        )
    if not ext_proc.at("max_message_timeout").seconds:
        yield ext_proc.at("max_message_timeout").problem(
            "without max_message_timeout a request that must wait in the queue gets a 504; write the "
            "longest wait, as in "
            "`max_message_timeout: 660s`"
        )
    if ext_proc.at("failure_mode_allow").true:
        tenants = bool(getattr(settings, "tenants", None))
        yield ext_proc.at("failure_mode_allow").problem(
            "failure_mode_allow: true lets requests pass without key and limit while extproc is down"
            + (", but there are tenants that need keys; write false" if tenants else ""),
            fatal=tenants,
        )
    if not ext_proc.at("mutation_rules", "allow_envoy").true:
        yield ext_proc.at("mutation_rules").problem(
            "extproc may not set x-envoy-* headers, so it cannot bound retries; write "
            "`mutation_rules: {allow_envoy: true}`"
        )


def _access_log(manager: Node, settings: Settings) -> Iterator[Problem]:
    if settings.feedback != "access_log":
        return
    ours = _extproc_clusters([manager])
    logs = [
        log
        for log in manager.at("access_log").typed(".HttpGrpcAccessLogConfig")
        if log.at("common_config", "grpc_service", "envoy_grpc", "cluster_name").text in ours
    ]
    if not logs:
        yield manager.at("access_log").problem(
            "no gRPC access log goes to extproc, so it never hears that a request ended; add the "
            "`access_log` of "
            "envoy/envoy.yaml, or set `feedback: stream`"
        )
        return
    for log in logs:
        headers = log.at("additional_request_headers_to_log")
        if _REQUEST_ID not in [item.text.lower() for item in headers.items()]:
            yield headers.problem(
                "access log records do not say which request they are about; write "
                f"`additional_request_headers_to_log: [{_REQUEST_ID}]`"
            )
    if not manager.at("access_log_options", "access_log_flush_interval"):
        yield manager.at("access_log_options").problem(
            "long streams are not reported while they run and would be taken for lost; write "
            "`access_log_options: {access_log_flush_interval: 60s}`"
        )
    routers = manager.at("http_filters").typed(".Router")
    if not any(router.at("upstream_log") for router in routers):
        yield manager.at("http_filters").problem(
            "failed attempts that a retry hides are not reported, so failing endpoints are noticed late; "
            "add the "
            "router's `upstream_log` of envoy/envoy.yaml",
            fatal=False,
        )


def _extproc_clusters(managers: list[Node]) -> set[str]:
    names = {
        ext_proc.at("grpc_service", "envoy_grpc", "cluster_name").text
        for manager in managers
        for ext_proc in manager.at("http_filters").typed(".ExternalProcessor")
    }
    return names - {""}
