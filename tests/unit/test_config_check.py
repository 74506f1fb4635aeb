"""``extproc check``: an Envoy bootstrap that would lose requests, or let them pass, is said at its line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.config.check import check
from extproc.config.judge import reason_in
from extproc.config.lint import lint
from extproc.config.schema import Settings
from extproc.config.yaml_source import NodePath, read

ROOT = Path(__file__).parents[2]
ENVOY = shutil.which("envoy", path=str(ROOT / ".venv" / "bin")) or shutil.which("envoy")

GOOD = (Path(__file__).parent / "fixtures" / "bootstrap.yaml").read_text()


def settings(**said: object) -> Settings:
    base: dict[str, object] = {"envoy": {"admin": "127.0.0.1:9901"}}
    return Settings.model_validate({**base, **said}, context={"folder": Path("/etc/gateway")})


def linted(text: str, said: Settings | None = None) -> list[str]:
    return [str(problem) for problem in lint(read(text, "envoy.yaml"), said or settings())]


def changed(old: str, new: str) -> tuple[str, int]:
    """The good bootstrap with one change, and the line it is on."""
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new), GOOD[: GOOD.index(old)].count("\n") + 1


def test_a_good_bootstrap_has_no_problems() -> None:
    assert linted(GOOD) == []


@pytest.mark.parametrize("name", ["envoy.yaml", "cluster-header.yaml", "sidecar.yaml", "tls.yaml"])
def test_the_bootstraps_we_ship_have_no_problems(name: str) -> None:
    assert [str(problem) for problem in check(ROOT / "extproc.yaml", ROOT / "envoy" / name)] == []


def test_the_fail_open_bootstrap_has_a_warning() -> None:
    found = check(ROOT / "extproc.yaml", ROOT / "envoy" / "fail-open.yaml")
    assert [(problem.fatal, problem.message) for problem in found] == [
        (False, "failure_mode_allow: true lets requests pass without key and limit while extproc is down")
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "request_header_mode: SEND",
            "request_header_mode: SKIP",
            "request_header_mode SKIP sends requests on before extproc has decided; write SEND",
        ),
        (
            "request_body_mode: BUFFERED",
            "request_body_mode: STREAMED",
            "request_body_mode STREAMED does not show extproc the whole body, so it cannot read model and "
            "prompt; write BUFFERED",
        ),
        (
            "response_header_mode: SKIP",
            "response_body_mode: STREAMED",
            "warning: response_body_mode STREAMED sends every token through extproc, which does not read "
            "them; write NONE",
        ),
        (
            "message_timeout: 2s",
            "message_timeout: 0.5s",
            "message_timeout 0.5s turns a short pause of extproc into 504s; write 2s",
        ),
        (
            "failure_mode_allow: false",
            "failure_mode_allow: true",
            "warning: failure_mode_allow: true lets requests pass without key and limit while extproc is "
            "down",
        ),
        (
            "mutation_rules: {allow_envoy: true}",
            "mutation_rules: {allow_envoy: false}",
            "extproc may not set x-envoy-* headers, so it cannot bound retries; write `mutation_rules: "
            "{allow_envoy: true}`",
        ),
        (
            "metadata_options: {receiving_namespaces: {untyped: [envoy.lb]}}",
            "metadata_options: {receiving_namespaces: {untyped: [other]}}",
            "Envoy drops the endpoints that extproc names; write `metadata_options: {receiving_namespaces: "
            "{untyped: "
            "[envoy.lb, gateway]}}`",
        ),
        (
            "validate_clusters: false",
            "validate_clusters: true",
            "engine clusters come by CDS after the routes are read; write `validate_clusters: false`",
        ),
        (
            "request_body_buffer_limit: 67108864",
            "request_body_buffer_limit: 1048576",
            "request bodies above 1MiB get a 413 here, but `limits.max_body_bytes` is 64MiB; write "
            "`request_body_buffer_limit: 67108864` on the route",
        ),
        (
            "timeout: 0s\n                  inline",
            "timeout: 30s\n                  inline",
            "timeout 30s cuts generations short; write `timeout: 0s`",
        ),
        (
            "override_metadata_namespace: envoy.lb",
            "override_metadata_namespace: other",
            "the priority_group specifier does not read what extproc decides; write "
            "`override_metadata_namespace: envoy.lb`",
        ),
        (
            "refresh_cluster_on_retry: true",
            "refresh_cluster_on_retry: false",
            "retries go to the cluster that has just failed; write `refresh_cluster_on_retry: true`",
        ),
        (
            "additional_request_headers_to_log: [x-gateway-request-id]",
            "additional_request_headers_to_log: [x-request-id]",
            "access log records do not say which request they are about; write "
            "`additional_request_headers_to_log: "
            "[x-gateway-request-id]`",
        ),
        (
            "circuit_breakers: {thresholds: [{max_requests: 100000}]}",
            "circuit_breakers: {thresholds: [{max_requests: 1024}]}",
            "at most 1024 requests at once reach extproc, further ones get an error, but "
            "`limits.max_streams` is 20000; "
            "write `max_requests: 100000` (and the same for max_connections and max_pending_requests)",
        ),
        (
            "endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: live/extproc.sock}}}}]}]",
            "endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: run/ext.sock}}}}]}]",
            "Envoy looks for extproc at `run/ext.sock`, but `listen.grpc` is "
            "`unix:/etc/gateway/envoy/live/extproc.sock`; "
            "make them the same",
        ),
        (
            "cds_config: {path_config_source: {path: live/clusters.yaml}}",
            "cds_config: {path_config_source: {path: xds/clusters.yaml}}",
            "warning: Envoy reads its clusters from `xds/clusters.yaml`, but extproc writes them into "
            "`/etc/gateway/envoy/live` (`envoy.live`); make them the same folder",
        ),
        (
            "port_value: 9901",
            "port_value: 9999",
            "warning: extproc asks Envoy's admin at `127.0.0.1:9901` (`envoy.admin`) whether new clusters "
            "have arrived, "
            "but Envoy listens at port 9999; make them the same, or write `envoy: {admin: null}`",
        ),
    ],
)
def test_a_wrong_value_is_said_at_its_line(old: str, new: str, message: str) -> None:
    text, line = changed(old, new)
    assert linted(text) == [f"envoy.yaml:{line}: {message}"]


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (
            "                request_body_mode: BUFFERED\n",
            "request_body_mode NONE (the default) does not show extproc",
        ),
        ("              message_timeout: 2s\n", "message_timeout 0.2s (the default) turns a short pause"),
        ("              max_message_timeout: 660s\n", "without max_message_timeout a request that must wait"),
        ("              mutation_rules: {allow_envoy: true}\n", "extproc may not set x-envoy-* headers"),
        ("            validate_clusters: false\n", "engine clusters come by CDS"),
        ("                request_body_buffer_limit: 67108864\n", "request bodies above 1MiB get a 413 here"),
        ("                  timeout: 0s\n", "timeout 15s (the default) cuts generations short"),
        (
            "                    refresh_cluster_on_retry: true\n",
            "retries go to the cluster that has just failed",
        ),
        (
            "              - remove_on_match: {key_matcher: {prefix: x-gateway-}}\n",
            "clients can send our control headers (x-gateway-…)",
        ),
        ("          access_log_options: {access_log_flush_interval: 60s}\n", "long streams are not reported"),
        (
            "    circuit_breakers: {thresholds: [{max_requests: 100000}]}\n",
            "at most 1024 requests at once reach extproc",
        ),
        (
            '              - append: {header: {key: x-gateway-request-id, value: "%UNIQUE_ID%"}}\n',
            "requests get no x-gateway-request-id",
        ),
        (
            "        explicit_http_config: {http2_protocol_options: {}}\n",
            "cluster `extproc` does not speak HTTP/2, which gRPC needs",
        ),
    ],
)
def test_an_absent_key_is_said_at_the_line_above(gone: str, message: str) -> None:
    text, _ = changed(gone, "")
    (problem,) = linted(text)
    assert message in problem
    assert 1 <= int(problem.split(":")[1]) <= text.count("\n")


def test_a_bootstrap_without_ext_proc_is_refused() -> None:
    text = GOOD.replace("ext_proc.v3.ExternalProcessor", "lua.v3.Lua")
    assert linted(text) == [
        "envoy.yaml:5: no listener has an ext_proc filter, so no request reaches extproc; add "
        "`envoy.filters.http.ext_proc` to `http_filters` before the router, as in envoy/envoy.yaml"
    ]


def test_no_access_log_is_fine_only_for_feedback_by_stream() -> None:
    text = GOOD.replace("          access_log:\n", "          no_access_log:\n")
    assert linted(text) == [
        "envoy.yaml:11: no gRPC access log goes to extproc, so it never hears that a request ended; add "
        "the `access_log` of "
        "envoy/envoy.yaml, or set `feedback: stream`"
    ]
    assert linted(text, settings(feedback="stream")) == []


def test_fail_open_together_with_tenants_is_refused() -> None:
    text, line = changed("failure_mode_allow: false", "failure_mode_allow: true")
    said = settings(tenants={"a": {"keys": ["env:KEY_OF_A"]}})
    assert linted(text, said) == [
        f"envoy.yaml:{line}: failure_mode_allow: true lets requests pass without key and limit while "
        "extproc is down, "
        "but there are tenants that need keys; write false"
    ]


def test_a_listener_limit_counts_where_the_route_has_none() -> None:
    text, _ = changed("                request_body_buffer_limit: 67108864\n", "")
    assert (
        linted(
            text.replace(
                "  - name: gateway\n",
                "  - name: gateway\n    per_connection_buffer_limit_bytes: 67108864\n",
                1,
            )
        )
        == []
    )


def test_a_route_without_ext_proc_may_do_as_it_likes() -> None:
    text, _ = changed(
        "              - match: {prefix: /}\n",
        "              - match: {prefix: /static}\n"
        "                route: {cluster: files}\n"
        "                typed_per_filter_config:\n"
        "                  envoy.filters.http.ext_proc:\n"
        '                    "@type": type.googleapis.com/'
        "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute\n"
        "                    disabled: true\n"
        "              - match: {prefix: /}\n",
    )
    assert linted(text) == []


@pytest.mark.parametrize(
    ("grpc", "address", "message"),
    [
        ("127.0.0.1:9002", "127.0.0.1:9002", None),
        ("0.0.0.0:9002", "extproc:9002", None),
        (
            "127.0.0.1:9002",
            "127.0.0.1:9003",
            "Envoy looks for extproc at `127.0.0.1:9003`, but `listen.grpc` is `127.0.0.1:9002`; make them "
            "the same",
        ),
        (
            "unix:x.sock",
            "127.0.0.1:9003",
            "Envoy looks for extproc at `127.0.0.1:9003`, but `listen.grpc` is `unix:/etc/gateway/x.sock`; "
            "make them the same",
        ),
        (
            "127.0.0.1:9002",
            "extproc:9002",
            "warning: Envoy looks for extproc at `extproc`, but `listen.grpc` is `127.0.0.1:9002`, which "
            "only this machine reaches; listen on an address that Envoy reaches",
        ),
    ],
)
def test_both_must_mean_the_same_address(grpc: str, address: str, message: str | None) -> None:
    host, port = address.split(":")
    text, line = changed(
        "{pipe: {path: live/extproc.sock}}", f"{{socket_address: {{address: {host}, port_value: {port}}}}}"
    )
    found = linted(text, settings(listen={"grpc": grpc, "grpc_allow_remote": True}))
    assert found == ([] if message is None else [f"envoy.yaml:{line}: {message}"])


CLUSTER = """\
resources:
- name: a
  type: STATIC
  metadata: {filter_metadata: {extproc: {pool: p, model: m}}}
  load_assignment:
    cluster_name: a
    endpoints:
    - lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8000}}}}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole good configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envoy").mkdir()
    (tmp_path / "extproc.yaml").write_text("envoy: {admin: '127.0.0.1:9901'}\n")
    (tmp_path / "envoy/clusters.yaml").write_text(CLUSTER)
    (tmp_path / "envoy/envoy.yaml").write_text(GOOD)
    return tmp_path


def checked(folder: Path, binary: str | None = None) -> list[str]:
    return [str(p) for p in check(folder / "extproc.yaml", folder / "envoy/envoy.yaml", envoy_binary=binary)]


def test_problems_of_all_three_files_come_at_once(folder: Path) -> None:
    assert checked(folder) == []
    (folder / "extproc.yaml").write_text("default_pool: q\nenvoy: {admin: '127.0.0.1:9901'}\n")
    (folder / "envoy/clusters.yaml").write_text(
        CLUSTER.replace("  load", "  circuit_breakers: {thresholds: [{max_retries: 3}]}\n  load")
    )
    (folder / "envoy/envoy.yaml").write_text(GOOD.replace("message_timeout: 2s", "message_timeout: 0.1s"))
    assert checked(folder) == [
        "envoy/clusters.yaml:2: cluster `a` allows 3 retries at once, so a dead first choice becomes an "
        "error under load; "
        "write `max_retries: 1000` (extproc keeps the retry budget)",
        "envoy/envoy.yaml:51: message_timeout 0.1s turns a short pause of extproc into 504s; write 2s",
        "extproc.yaml:1: there is no pool `q`. There are: p",
    ]


def test_engine_clusters_in_the_bootstrap_must_be_whole(folder: Path) -> None:
    engine = CLUSTER.removeprefix("resources:\n").replace("name: a", "name: b").replace("\n", "\n  ").rstrip()
    (folder / "envoy/envoy.yaml").write_text(GOOD + "  " + engine + "\n")
    line = GOOD.count("\n") + 1
    assert checked(folder) == [
        f"envoy/envoy.yaml:{line}: cluster `b` allows 3 (the default) retries at once, so a dead first "
        "choice becomes an "
        "error under load; write `circuit_breakers: {thresholds: [{max_connections: 100000, "
        "max_pending_requests: 100000, "
        "max_requests: 100000, max_retries: 1000}]}`",
        f"envoy/envoy.yaml:{line}: no idle_timeout for `b`: Envoy's is an hour, and the engine closes idle "
        "connections "
        "after 5 s; write common_http_protocol_options: {idle_timeout: 3s}",
    ]


def test_an_unreadable_bootstrap_is_a_problem(folder: Path) -> None:
    (folder / "envoy/envoy.yaml").write_text("a: [\n")
    (problem,) = checked(folder)
    assert problem.startswith("envoy/envoy.yaml:2: not valid YAML")


def test_a_faulty_value_does_not_hide_references_that_lead_nowhere(folder: Path) -> None:
    (folder / "extproc.yaml").write_text(
        "envoy: {admin: '127.0.0.1:9901'}\n"
        "rout: []\n"
        "tiers:\n"
        "  gold: {}\n"
        "  iron: {wait: 5s, weight: {}}\n"
        "tenants:\n"
        "  a: {keys: ['env:PATH'], tier: golt, limits: {rpm: -5}}\n"
        "  b: {keys: ['env:PATH'], tier: iron}\n"
    )
    lines = [line.partition("Keys here")[0].partition("There are")[0] for line in checked(folder)]
    assert lines == [
        "extproc.yaml:2: unknown key `rout`; did you mean `routes`? ",
        "extproc.yaml:5: `tiers.iron.weight` must be a number, not `{}`",
        "extproc.yaml:5: unknown key `wait` in `tiers.iron`; did you mean `max_wait`? ",
        "extproc.yaml:7: `tenants.a.limits.rpm` must be more than 0, not `-5`",
        "extproc.yaml:7: there is no tier `golt`; did you mean `gold`? ",
        "extproc.yaml:8: a key of tenant `b` is a key of tenant `a` too; give each its own",
    ]


def test_nobody_is_blamed_for_naming_what_is_only_faulty(folder: Path) -> None:
    (folder / "extproc.yaml").write_text(
        "envoy: {admin: '127.0.0.1:9901'}\n"
        "default_pool: q\n"
        "pools: {q: 5}\n"
        "routes:\n"
        "- {name: one, pool: 7}\n"
        "- {name: two, pool: nowhere}\n"
        "teirs: {gold: {}}\n"
        "tenants: {a: {keys: ['env:PATH'], tier: gold, route: two}}\n"
    )
    assert [line.split(":")[1] for line in checked(folder)] == ["3", "5", "7"]


def test_a_port_that_there_is_not_is_said_once(folder: Path) -> None:
    text = GOOD.replace("port_value: 8080", "port_value: 180020")
    assert text != GOOD
    (folder / "envoy/envoy.yaml").write_text(text)
    (problem,) = checked(folder, ENVOY)
    assert problem.endswith("`port_value` must be a whole number from 1 to 65535, not `180020`")


@pytest.mark.parametrize(
    ("output", "reason", "path"),
    [
        (
            "error initializing configuration 'x': goo.gle/debugstr\nadmin {\n  address: 5\n}\n: Proto constraint "
            "validation failed (BootstrapValidationError.StaticResources: embedded message failed validation | caused "
            "by StaticResourcesValidationError.Listeners[1]: embedded message failed validation | caused by "
            "ListenerValidationError.StatPrefix: value length must be at least 1 characters)\n",
            "`stat_prefix`: value length must be at least 1 characters",
            ("static_resources", "listeners", 1, "stat_prefix"),
        ),
        (
            "error initializing configuration 'x': Proto constraint validation failed (RouteActionValidationError."
            "Timeout: too long)",
            "`timeout`: too long",
            (),
        ),
        (
            "error initializing configuration 'x': Protobuf message (type envoy.config.bootstrap.v3.Bootstrap reason "
            "INVALID_ARGUMENT: unknown enum value: 'AUT') has unknown fields",
            "unknown enum value: 'AUT'",
            (),
        ),
    ],
)
def test_of_what_envoy_prints_the_reason_is_kept(output: str, reason: str, path: NodePath) -> None:
    assert reason_in(output) == (reason, path)


@pytest.mark.skipif(ENVOY is None, reason="no Envoy binary here")
def test_envoy_judges_bootstrap_and_clusters_together(folder: Path) -> None:
    shutil.copy(ROOT / "envoy/envoy.yaml", folder / "envoy/envoy.yaml")
    (folder / "extproc.yaml").write_text("")
    (folder / "envoy/live").mkdir()
    assert checked(folder, ENVOY) == []

    good = (folder / "envoy/envoy.yaml").read_text()
    bad = good.replace("retry_on: connect-failure", "retry_onn: connect-failure")
    (folder / "envoy/envoy.yaml").write_text(bad)
    line = bad[: bad.index("retry_onn")].count("\n") + 1
    (problem,) = checked(folder, ENVOY)
    assert problem.startswith(f"envoy/envoy.yaml:{line}: Envoy refuses this: ")
    assert "no such field: 'retry_onn'" in problem

    (folder / "envoy/envoy.yaml").write_text(good)
    refused = CLUSTER + CLUSTER.removeprefix("resources:\n").replace("name: a", "name: b").replace(
        "  load_assignment:",
        "  lb_policy: RING_HASH\n"
        "  ring_hash_lb_config: {minimum_ring_size: 9, maximum_ring_size: 2}\n"
        "  load_assignment:",
    )
    (folder / "envoy/clusters.yaml").write_text(refused)
    (problem,) = checked(folder, ENVOY)
    assert problem == (
        "envoy/clusters.yaml:9: Envoy refuses this: ring hash: minimum_ring_size (9) > maximum_ring_size (2)"
    )


def test_a_binary_that_is_not_there_is_a_warning(folder: Path) -> None:
    (problem,) = checked(folder, "/nowhere/envoy")
    assert problem.startswith("envoy/envoy.yaml:0: warning: could not be judged by `/nowhere/envoy`: ")


def test_a_bootstrap_of_any_shape_is_linted_without_an_exception() -> None:
    whole = read(GOOD, "envoy.yaml")
    for path, _ in list(walk(whole.data, ())):
        for wrong in (None, 5, "x", [], {}, [5], {"x": [None]}):
            document = read(GOOD, "envoy.yaml")
            parent = document.data
            for step in path[:-1]:
                parent = parent[step]  # type: ignore[index]
            parent[path[-1]] = wrong  # type: ignore[index]
            assert all(problem.message for problem in lint(document, settings()))


def walk(data: object, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], object]]:
    below = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in below:
        yield (*path, key), value
        yield from walk(value, (*path, key))
