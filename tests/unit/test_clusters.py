"""clusters.yaml: what is ours, what is said to Envoy, and every fault at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config.cluster_tls import UpstreamTls
from extproc.config.clusters import Clusters, read_clusters
from extproc.config.problem import ConfigError
from extproc.config.yaml_source import read, read_file
from extproc.fleet.endpoint import Role

ENVOY = Path(__file__).resolve().parents[2] / "envoy"
POLICY = "load_balancing_policy"
TLS = "transport_socket: {name: envoy.transport_sockets.tls}"


def clusters(text: str, base: Path | None = None) -> Clusters:
    return read_clusters(read(text, "clusters.yaml"), base)


def problems(text: str, base: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        clusters(text, base)
    return [str(problem) for problem in caught.value.problems]


def cluster(
    name: str, *addresses: str, kind: str = "STATIC", extproc: str = "{pool: p, model: m}", more: str = ""
) -> str:
    lines = [f"- name: {name}", f"  type: {kind}", f"  metadata: {{filter_metadata: {{extproc: {extproc}}}}}"]
    lines += [f"  {line}" for line in more.splitlines()]
    lines += ["  load_assignment:", f"    cluster_name: {name}", "    endpoints:", "    - lb_endpoints:"]
    for address in addresses:
        host, _, port = address.rpartition(":")
        lines.append(
            f"      - endpoint: {{address: {{socket_address: {{address: '{host}', port_value: {port}}}}}}}"
        )
    return "\n".join(lines) + "\n"


def listing(*items: str) -> str:
    return "resources:\n" + "".join(items)


class TestWhatIsOurs:
    def test_the_shipped_file_is_clean_and_its_engines_are_names_to_resolve(self) -> None:
        found = read_clusters(read_file(ENVOY / "clusters.yaml"))
        assert [name.host for name in found.dns] == ["engine-1", "engine-2", "engine-3"]
        assert found.fixed == ()
        assert found.warnings == ()

    def test_one_address_needs_no_list_several_do(self) -> None:
        found = clusters(listing(cluster("a", "10.0.0.1:80"), cluster("b", "10.0.0.2:80", "10.0.0.3:80")))
        assert [(spec.key, spec.listed) for spec in found.endpoints] == [
            ("a/10.0.0.1:80", False),
            ("b/10.0.0.2:80", True),
            ("b/10.0.0.3:80", True),
        ]
        assert [POLICY in resource for resource in found.resources] == [False, True]

    def test_an_endpoint_overrides_its_cluster(self) -> None:
        text = listing(
            cluster(
                "b",
                "10.0.0.2:80",
                extproc="{pool: p, model: [m, n], version: v1, weight: 2, labels: {gpu: h100}}",
            )
        )
        text += (
            "        metadata: {filter_metadata: {extproc: {version: 2, role: decode, state: draining}}}\n"
        )
        (spec,) = clusters(text).endpoints
        assert (spec.models, spec.version, spec.weight) == (("m", "n"), "2", 2.0)
        assert (spec.role, spec.draining, spec.labels) == (Role.DECODE, True, {"gpu": "h100"})

    def test_a_cluster_without_our_metadata_passes_through_untouched(self) -> None:
        text = "clusters:\n- {name: other, type: STATIC, connect_timeout: 9s}\n"
        found = clusters(text)
        assert found.endpoints == ()
        assert found.names == {"other": 2}
        assert found.resources == (
            {
                "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
                "name": "other",
                "type": "STATIC",
                "connect_timeout": "9s",
            },
        )

    def test_metadata_without_a_pool_is_a_warning(self) -> None:
        found = clusters(listing(cluster("a", "10.0.0.1:80", extproc="{model: m}")))
        assert found.endpoints == ()
        assert [str(warning) for warning in found.warnings] == [
            "clusters.yaml:2: warning: cluster `a` has extproc metadata but no `pool`, so it gets no "
            "requests; write `pool: NAME`"
        ]

    def test_ipv6_and_locality_and_tls(self) -> None:
        text = listing(
            cluster("a", "2001:db8::1:8000", more=TLS).replace(
                "    - lb_endpoints:", "    - locality: {region: eu, zone: a}\n      lb_endpoints:"
            )
        )
        (spec,) = clusters(text).endpoints
        assert (spec.address, spec.locality, spec.tls) == ("[2001:db8::1]:8000", "eu/a", True)

    def test_an_empty_file_is_no_cluster(self) -> None:
        assert clusters("").endpoints == ()

    def test_camel_case_is_envoys_other_spelling(self) -> None:
        text = """
clusters:
- name: a
  connectTimeout: 3s
  metadata: {filterMetadata: {extproc: {pool: p}}}
  loadAssignment:
    clusterName: a
    endpoints: [{lbEndpoints: [{endpoint: {address: {socketAddress: {address: 10.0.0.1, portValue: 80}}}}]}]
"""
        found = clusters(text)
        assert [spec.key for spec in found.endpoints] == ["a/10.0.0.1:80"]
        assert "connect_timeout" not in found.resources[0]


class TestNames:
    def test_every_address_of_a_strict_dns_name_is_an_endpoint(self) -> None:
        found = clusters(listing(cluster("a", "engines.svc:8000", kind="STRICT_DNS")))
        assert [(spec.address, spec.listed) for spec in found.endpoints] == [("engines.svc:8000", False)]
        resolved = found.expand({("engines.svc", 8000): ("10.0.0.1", "10.0.0.2")})
        assert [(spec.address, spec.listed) for spec in resolved] == [
            ("10.0.0.1:8000", True),
            ("10.0.0.2:8000", True),
        ]
        assert POLICY in found.resources[0]

    def test_a_logical_dns_name_stays_one_endpoint(self) -> None:
        found = clusters(listing(cluster("a", "engine:8000", kind="LOGICAL_DNS")))
        (spec,) = found.expand({("engine", 8000): ("10.0.0.1", "10.0.0.2")})
        assert (spec.address, spec.listed) == ("engine:8000", False)
        assert POLICY not in found.resources[0]

    def test_a_name_in_a_static_cluster_is_refused(self) -> None:
        (text,) = problems(listing(cluster("a", "engine:8000")))
        assert text.startswith("clusters.yaml:9: `engine` is a name")


class TestEds:
    def test_endpoints_come_from_the_file_it_names(self, tmp_path: Path) -> None:
        (tmp_path / "eds.yaml").write_text(
            "resources:\n- cluster_name: a\n  endpoints:\n  - lb_endpoints:\n"
            "    - endpoint: {address: {socket_address: {address: 10.0.0.9, port_value: 80}}}\n"
        )
        text = """
resources:
- name: a
  type: EDS
  metadata: {filter_metadata: {extproc: {pool: p}}}
  eds_cluster_config: {eds_config: {resource_api_version: V3, path_config_source: {path: eds.yaml}}}
"""
        found = clusters(text, tmp_path)
        assert [(spec.key, spec.listed) for spec in found.endpoints] == [("a/10.0.0.9:80", True)]
        assert found.files == (tmp_path / "eds.yaml",)

    def test_faults_in_that_file_name_that_file(self, tmp_path: Path) -> None:
        (tmp_path / "eds.yaml").write_text("resources:\n- cluster_name: a\n  endpoint: []\n")
        text = """
resources:
- name: a
  type: EDS
  metadata: {filter_metadata: {extproc: {pool: p}}}
  eds_cluster_config: {eds_config: {path_config_source: {path: eds.yaml}}}
"""
        (problem,) = problems(text, tmp_path)
        assert problem == (
            f"{tmp_path}/eds.yaml:3: "
            "Envoy's ClusterLoadAssignment has no field `endpoint`; did you mean `endpoints`?"
        )


class TestCompletion:
    def test_what_engines_need_is_added(self) -> None:
        (resource,) = clusters(listing(cluster("a", "10.0.0.1:80"))).resources
        http = resource["typed_extension_protocol_options"][
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        ]
        assert resource["connect_timeout"] == "1s"
        assert http["common_http_protocol_options"] == {"idle_timeout": "3s"}
        assert http["explicit_http_config"] == {"http_protocol_options": {}}
        assert resource["circuit_breakers"]["thresholds"][0]["max_retries"] == 1000

    def test_what_is_written_stands(self) -> None:
        more = "connect_timeout: 2s\ncircuit_breakers: {thresholds: [{max_retries: 7}]}"
        (resource,) = clusters(listing(cluster("a", "10.0.0.1:80", more=more))).resources
        assert resource["connect_timeout"] == "2s"
        assert resource["circuit_breakers"]["thresholds"] == [
            {
                "max_retries": 7,
                "max_connections": 100000,
                "max_pending_requests": 100000,
                "max_requests": 100000,
            }
        ]

    def test_the_idle_timeout_follows_the_engines_keep_alive(self) -> None:
        (resource,) = clusters(
            listing(cluster("a", "10.0.0.1:80", extproc="{pool: p, keep_alive_s: 60}"))
        ).resources
        http = resource["typed_extension_protocol_options"][
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        ]
        assert http["common_http_protocol_options"] == {"idle_timeout": "36s"}

    def test_options_at_the_cluster_itself_are_kept_where_envoy_reads_them(self) -> None:
        older = "common_http_protocol_options: {idle_timeout: 2s}\nhttp2_protocol_options: {}"
        (resource,) = clusters(listing(cluster("a", "10.0.0.1:80", more=older))).resources
        http = resource["typed_extension_protocol_options"][
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        ]
        assert http["common_http_protocol_options"] == {"idle_timeout": "2s"}
        assert http["explicit_http_config"] == {"http2_protocol_options": {}}
        assert not {"common_http_protocol_options", "http2_protocol_options"} & resource.keys()

    def test_clusters_of_a_bootstrap_are_read_and_not_published(self) -> None:
        found = read_clusters(read_file(ENVOY / "sidecar.yaml"))
        assert found.endpoints
        assert found.resources == ()


IDLE = """typed_extension_protocol_options:
  envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
    "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
    common_http_protocol_options: {idle_timeout: 10s}
    explicit_http_config: {http_protocol_options: {}}"""


class TestFaults:
    def test_an_idle_timeout_above_the_keep_alive(self) -> None:
        (text,) = problems(listing(cluster("a", "10.0.0.1:80", more=IDLE)))
        assert text.startswith("clusters.yaml:8: idle_timeout 10s is not below the engine's keep-alive (5 s)")

    def test_an_idle_timeout_at_the_cluster_itself_is_judged_too(self) -> None:
        older = "common_http_protocol_options: {idle_timeout: 60s}"
        (text,) = problems(listing(cluster("a", "10.0.0.1:80", more=older)))
        assert text.startswith("clusters.yaml:5: idle_timeout 60s is not below the engine's keep-alive (5 s)")

    def test_a_port_that_there_is_not(self) -> None:
        (text,) = problems(listing(cluster("a", "10.0.0.1:99999")))
        assert text.endswith("`port_value` must be a whole number from 1 to 65535, not `99999`")

    def test_an_engine_that_is_not_known(self) -> None:
        (text,) = problems(listing(cluster("a", "10.0.0.1:80", extproc="{pool: p, engine: vlm}")))
        assert text == (
            "clusters.yaml:4: `engine` must be one of vllm, sglang, trtllm, triton, tgi, llamacpp, other, not `vlm`; "
            "did you mean `vllm`?"
        )
        assert clusters(listing(cluster("a", "10.0.0.1:80", extproc="{pool: p, engine: other}"))).endpoints

    def test_two_clusters_of_one_name(self) -> None:
        (text,) = problems(listing(cluster("a", "10.0.0.1:80"), cluster("a", "10.0.0.2:80")))
        assert text == "clusters.yaml:10: cluster `a` is already on line 2; rename one"

    def test_all_faults_at_once_each_at_its_line(self) -> None:
        text = """
resources:
- name: a
  tpye: STATIC
  connect_timeout: 1
  metadata: {filter_metadata: {extproc: {pool: p}}}
- name: b
  type: STATICS
  metadata:
    filter_metadata:
      extproc:
        pool: p
- name: c
  type: STATIC
  metadata:
    filter_metadata:
      extproc:
        pool: p
        max_concurency: 3
        weight: 0
        role: both
        labels: [1]
"""
        found = problems(text)
        assert [line.split(":")[1] for line in found] == ["4", "5", "8", "19", "20", "22"]
        assert found[0].endswith("Envoy's Cluster has no field `tpye`; did you mean `type`?")
        assert "must be a duration such as `1s`" in found[1]
        assert "cannot be `STATICS`; write one of STATIC, STRICT_DNS" in found[2]
        assert found[3].endswith(
            "unknown key `max_concurency` in the extproc metadata; did you mean `max_concurrency`?"
        )
        assert "`weight` must be a number above 0" in found[4]

    def test_several_replicas_behind_a_policy_that_cannot_be_told(self) -> None:
        (text,) = problems(listing(cluster("a", "10.0.0.1:80", "10.0.0.2:80", more="lb_policy: ROUND_ROBIN")))
        assert "no override_host policy" in text

    def test_an_endpoint_without_an_address(self) -> None:
        text = """
resources:
- name: a
  type: STATIC
  metadata: {filter_metadata: {extproc: {pool: p}}}
  load_assignment:
    cluster_name: a
    endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: /x}}}}]}]
"""
        (found,) = problems(text)
        assert found.startswith("clusters.yaml:8: an engine needs `endpoint.address.socket_address`")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("resources: {a: 1}", "must be a list of clusters"),
            ("resources: [5]", "a cluster must be keys with values"),
            ("resources: [{type: STATIC}]", "a cluster needs a `name`"),
            ("resource: []", "no clusters here"),
            ("resources: []\nlisteners: []", "unknown key `listeners`"),
            ("resources: [{name: 5}]", "`name` must be text"),
            (
                'resources: [{"@type": type.googleapis.com/envoy.config.listener.v3.Listener, name: a}]',
                "only clusters belong here",
            ),
        ],
    )
    def test_a_file_of_another_kind(self, text: str, message: str) -> None:
        assert message in problems(text)[0]

    def test_an_extension_we_do_not_know_goes_to_envoy_unread(self) -> None:
        more = 'transport_socket: {name: x, typed_config: {"@type": t/envoy.new.v9.Thing, a: 1}}'
        found = clusters(listing(cluster("a", "10.0.0.1:80", more=more)))
        assert "`envoy.new.v9.Thing` is not known to this check" in str(found.warnings[0])
        assert found.resources[0]["transport_socket"]["typed_config"]["a"] == 1


def test_the_tls_of_a_cluster_is_known_for_its_metrics() -> None:
    text = """
resources:
- name: secure
  type: STRICT_DNS
  metadata: {filter_metadata: {extproc: {pool: p}}}
  transport_socket:
    name: envoy.transport_sockets.tls
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
      sni: engines.internal
      common_tls_context: {validation_context: {trusted_ca: {filename: /etc/ca.pem}}}
  load_assignment:
    cluster_name: secure
    endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: e, port_value: 443}}}}]}]
"""
    clusters = read_clusters(read(text, "clusters.yaml"))
    assert clusters.tls == {"secure": UpstreamTls(ca_file="/etc/ca.pem", server_name="engines.internal")}
    assert clusters.endpoints[0].tls
