"""Writes the variants of envoy/envoy.yaml: tls, sidecar, cluster-header, fail-open.

Each is the main file with a few passages replaced, comments included, so that they cannot drift apart:

    python deploy/variants.py            write them
    python deploy/variants.py --check    exit code 1 if a file differs from what would be written

A passage that is no longer found exactly once in envoy.yaml is an error here, not a silent difference there.
"""

# ruff: noqa: E501 - passages of YAML as they stand in the files
from __future__ import annotations

import sys
from pathlib import Path

ENVOY = Path(__file__).resolve().parents[1] / "envoy"
HEAD = "# Envoy in front of your engines, with extproc beside it. Tested with Envoy 1.40 (`make test` runs this file).\n"
MADE = "# Made from envoy.yaml by deploy/variants.py: change it there.\n"

TLS = {
    HEAD: "# envoy.yaml with TLS for clients (HTTP/1.1 and HTTP/2). Tested with Envoy 1.40.\n" + MADE,
    "envoy -c envoy.yaml  ": "envoy -c tls.yaml  ",
    "port_value: 8080": "port_value: 8443",
    "    filter_chains:\n    - filters:\n": """\
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            alpn_protocols: [h2, http/1.1]
            tls_params: {tls_minimum_protocol_version: TLSv1_2}
            # CHANGE: tls/certificate.yaml names the files. Renaming new ones into tls/ is noticed without a restart.
            tls_certificate_sds_secret_configs:
            - name: gateway
              sds_config:
                resource_api_version: V3
                path_config_source: {path: tls/certificate.yaml, watched_directory: {path: tls}}
      filters:
""",
}

SIDECAR = {
    HEAD: """\
# envoy.yaml as a sidecar: beside one application, in a mesh whose services have DNS names. Tested with Envoy 1.40.
"""
    + MADE
    + """\
# The application calls http://127.0.0.1:15006/v1; extproc runs in the same pod and shares the directory live/ (an emptyDir).
# The engines stand in this file, so extproc.yaml says `envoy: {clusters: envoy/sidecar.yaml}`, and a change of engines needs a
# restart of Envoy.
""",
    "envoy -c envoy.yaml        start extproc first: it writes live/clusters.yaml, without which Envoy does not start": (
        "envoy -c sidecar.yaml"
    ),
    "The engines are not here but in clusters.yaml. Paths": "Paths",
    """\
# Engine clusters: written by extproc (from clusters.yaml) by renaming a finished file into place, read again at once.
dynamic_resources:
  cds_config:
    resource_api_version: V3
    path_config_source: {path: live/clusters.yaml, watched_directory: {path: live}}

""": "",
    "address: 0.0.0.0, port_value: 8080}}   # CHANGE": "address: 127.0.0.1, port_value: 15006}}   # CHANGE",
    "use_remote_address: true               # CHANGE to false (or set xff_num_trusted_hops) behind another proxy": (
        "use_remote_address: true"
    ),
    "            validate_clusters: false             # engine clusters come and go\n": (
        "            validate_clusters: false\n"
    ),
    "  clusters:\n  - name: extproc\n": """\
  clusters:
  # CHANGE: the engines. As in clusters.yaml, but nothing is completed for you: idle_timeout must be below the engine's
  # keep-alive (vLLM: 5 s), and the limits high, since extproc decides what waits and what is sent again. A mesh service is one
  # name to Envoy; which of its replicas gets a request is the mesh's choice, so prefer a name for each replica.
  - name: llama-0
    type: STRICT_DNS
    connect_timeout: 1s
    dns_lookup_family: V4_PREFERRED
    metadata: {filter_metadata: {extproc: {pool: llama, model: llama-3-8b, engine: vllm}}}
    typed_extension_protocol_options: &engine-http
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {idle_timeout: 3s}
        explicit_http_config: {http_protocol_options: {}}
    circuit_breakers: &engine-limits {thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000, max_retries: 1000}]}
    load_assignment:
      cluster_name: llama-0
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: llama-0.llama.models.svc.cluster.local, port_value: 8000}}}}]}]
  - name: llama-1
    type: STRICT_DNS
    connect_timeout: 1s
    dns_lookup_family: V4_PREFERRED
    metadata: {filter_metadata: {extproc: {pool: llama, model: llama-3-8b, engine: vllm}}}
    typed_extension_protocol_options: *engine-http
    circuit_breakers: *engine-limits
    load_assignment:
      cluster_name: llama-1
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: llama-1.llama.models.svc.cluster.local, port_value: 8000}}}}]}]

  - name: extproc
""",
}

CLUSTER_HEADER = {
    HEAD: """\
# envoy.yaml for older Envoys: the cluster is taken from the header x-gateway-cluster. Tested with Envoy 1.40 only.
"""
    + MADE
    + """\
# What it lacks: a request that fails is sent again to another endpoint of the same cluster only; tokens are not counted.
""",
    "envoy -c envoy.yaml  ": "envoy -c cluster-header.yaml  ",
    "    filter_chains:\n": "    per_connection_buffer_limit_bytes: 67108864    # CHANGE: 64 MiB; limits.max_body_bytes in extproc.yaml must be as large\n    filter_chains:\n",
    "              request_body_buffer_limit: 67108864     # CHANGE: 64 MiB; limits.max_body_bytes in extproc.yaml must be as large\n": "",
    """\
                  # extproc names, for each request, the cluster of every attempt: attempt 1 goes to group 1, attempt 2 to
                  # group 2 … The group written here is what a request gets that extproc did not decide: none.
                  inline_cluster_specifier_plugin:
                    extension:
                      name: envoy.router.cluster_specifier_plugin.priority_group
                      typed_config:
                        "@type": type.googleapis.com/envoy.extensions.router.cluster_specifiers.priority_group.v3.PriorityGroupClusterSpecifier
                        override_metadata_namespace: envoy.lb
                        priority_groups:
                        - name: undecided
                          clusters: [{cluster_name: undecided, weight: 1}]
""": "                  cluster_header: x-gateway-cluster     # clients cannot send it: see above\n",
    "                    refresh_cluster_on_retry: true\n": "",
    """\
          - {name: envoy.filters.http.ai_protocol_manager, typed_config: *json-usage}
          - {name: envoy.filters.http.sse_to_metadata, typed_config: *sse-usage}
""": "",
}
_USAGE_BEGIN = "          # Token usage, read as it passes by."
_USAGE_END = "          - name: envoy.filters.http.router\n"

FAIL_OPEN = {
    HEAD: """\
# envoy.yaml that serves on when extproc is away. Tested with Envoy 1.40.
"""
    + MADE
    + """\
# While extproc is away every request goes to the clusters under `without-extproc`, WITH NO KEY AND NO LIMIT CHECKED, whatever
# model it names. Only for installations without tenants (`extproc check` refuses the combination) and with one model.
""",
    "envoy -c envoy.yaml  ": "envoy -c fail-open.yaml  ",
    "The group written here is what a request gets that extproc did not decide: none.": (
        "Without extproc the group written here serves."
    ),
    """\
                        - name: undecided
                          clusters: [{cluster_name: undecided, weight: 1}]
""": """\
                        - name: without-extproc          # CHANGE: clusters of clusters.yaml
                          clusters: [{cluster_name: engine-1, weight: 1}, {cluster_name: engine-2, weight: 1}]
                        - name: without-extproc-then     # for the second attempt
                          clusters: [{cluster_name: engine-3, weight: 1}]
""",
    "failure_mode_allow: false          # true would let requests pass without key and limit: see fail-open.yaml": (
        "failure_mode_allow: true"
    ),
}

VARIANTS = {
    "tls.yaml": TLS,
    "sidecar.yaml": SIDECAR,
    "cluster-header.yaml": CLUSTER_HEADER,
    "fail-open.yaml": FAIL_OPEN,
}


def variant(name: str) -> str:
    """The text of one variant.

    Raises:
        ValueError: a passage to replace is not in envoy.yaml exactly once.
    """
    text = (ENVOY / "envoy.yaml").read_text(encoding="utf-8")
    for old, new in VARIANTS[name].items():
        if text.count(old) != 1:
            raise ValueError(f"{name}: found {text.count(old)} times in envoy.yaml, not once: {old[:70]!r}")
        text = text.replace(old, new)
    if name == "cluster-header.yaml":
        begin, end = text.index(_USAGE_BEGIN), text.index(_USAGE_END)
        text = text[:begin] + text[end:]
    return text


def main() -> int:
    """Write all files, or compare them."""
    differing = []
    for name in VARIANTS:
        path, text = ENVOY / name, variant(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            differing.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    print(
        "\n".join(f"envoy/{name}: {'differs' if '--check' in sys.argv else 'written'}" for name in differing)
    )
    return 1 if differing and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
