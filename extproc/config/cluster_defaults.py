"""What a cluster of engines needs from Envoy and people should not have to write.

Only what is absent is added; what the file says stands. Why each value:

- ``idle_timeout`` well below the engine's keep-alive (vLLM closes idle connections after 5 s, and a starved Envoy is
  late): else a request can be written to a connection that the engine closes at that moment, and the client gets 503;
- high circuit breakers: Envoy's own (1,024 requests, 3 retries) would answer 503 where extproc has a queue
  and a retry budget;
- ``override_host``: how extproc names the replica when a cluster has several; without a name, least requests;
- options of the connections that stand at the cluster itself (Envoy's older place for them) move to where the others
  are: Envoy reads the older place only where there is no newer one;
- small buffers: a token stream never needs more, and thousands of streams then cost little memory.
"""

from __future__ import annotations

from typing import Any

from extproc.config.envoy_message import field

CLUSTER_TYPE = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
ENDPOINT_KEY = "x-gateway-destination-endpoint"
"""Metadata key (namespace ``envoy.lb``) and header of the endpoint list: the endpoint-picker protocol."""
SERVED_KEY = "x-gateway-destination-endpoint-served"

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_POLICIES = "envoy.extensions.load_balancing_policies"
_LIMIT = 100_000
_RETRIES = 1_000


def complete(cluster: dict[str, Any], *, list_hosts: bool, keep_alive_s: float) -> dict[str, Any]:
    """A copy of ``cluster`` with what is missing.

    ``list_hosts``: give it the ``override_host`` policy. ``keep_alive_s``: how long the engine keeps an idle
    connection.
    """
    done = {"@type": CLUSTER_TYPE, **cluster}
    _default(done, "connect_timeout", "1s")
    _default(done, "dns_lookup_family", "V4_PREFERRED")
    _default(done, "per_connection_buffer_limit_bytes", 32768)
    key, options = field(done, "typed_extension_protocol_options")
    options = dict(options or {})
    if HTTP_OPTIONS not in options:
        options[HTTP_OPTIONS] = _older_options(done)
    done[key] = _http_options(options, keep_alive_s)
    key, breakers = field(done, "circuit_breakers")
    done[key] = _breakers(breakers or {})
    if list_hosts:
        done["load_balancing_policy"] = _override_host()
    return done


def _default(cluster: dict[str, Any], name: str, value: object) -> None:
    key, present = field(cluster, name)
    if present is None:
        cluster[key] = value


def _older_options(cluster: dict[str, Any]) -> dict[str, Any]:
    """What ``cluster`` itself says of its connections, taken out of it and put as ``HttpProtocolOptions``."""
    found: dict[str, Any] = {}
    for name in ("common_http_protocol_options", "upstream_http_protocol_options"):
        key, value = field(cluster, name)
        if value is not None:
            found[name] = cluster.pop(key)
    for name in ("http2_protocol_options", "http_protocol_options"):
        key, value = field(cluster, name)
        if value is not None:
            found.setdefault("explicit_http_config", {name: cluster.pop(key)})
    return found


def _http_options(options: dict[str, Any], keep_alive_s: float) -> dict[str, Any]:
    http = {"@type": f"type.googleapis.com/{HTTP_OPTIONS}", **(options.get(HTTP_OPTIONS) or {})}
    key, common = field(http, "common_http_protocol_options")
    common = dict(common or {})
    _default(common, "idle_timeout", f"{keep_alive_s * 0.6:g}s")
    http[key] = common
    if not any(
        field(http, name)[1] is not None
        for name in ("explicit_http_config", "auto_config", "use_downstream_protocol_config")
    ):
        http["explicit_http_config"] = {"http_protocol_options": {}}
    return {**options, HTTP_OPTIONS: http}


def _breakers(breakers: dict[str, Any]) -> dict[str, Any]:
    thresholds = [dict(item) for item in breakers.get("thresholds") or [{}]]
    for item in thresholds:
        for name in ("max_connections", "max_pending_requests", "max_requests"):
            _default(item, name, _LIMIT)
        if field(item, "retry_budget")[1] is None:
            _default(item, "max_retries", _RETRIES)
    return {**breakers, "thresholds": thresholds}


def _override_host() -> dict[str, Any]:
    return {
        "policies": [
            _policy(
                "override_host",
                "OverrideHost",
                override_host_sources=[{"metadata": {"key": "envoy.lb", "path": [{"key": ENDPOINT_KEY}]}}],
                selected_host_key={"key": "envoy.lb", "path": [{"key": SERVED_KEY}]},
                fallback_policy={"policies": [_policy("least_request", "LeastRequest")]},
            )
        ]
    }


def _policy(name: str, message: str, **settings: object) -> dict[str, Any]:
    return {
        "typed_extension_config": {
            "name": f"envoy.load_balancing_policies.{name}",
            "typed_config": {"@type": f"type.googleapis.com/{_POLICIES}.{name}.v3.{message}", **settings},
        }
    }
