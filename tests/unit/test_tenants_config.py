"""Tenants, limits, fallbacks and schedules of extproc.yaml: mistakes with line and remedy, secrets, what holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from extproc.config.explain import explain
from extproc.config.lint import lint
from extproc.config.load import load
from extproc.config.problem import ConfigError
from extproc.config.schema import Settings
from extproc.config.secrets import SecretError, key_digests, secret
from extproc.config.yaml_source import read

CLUSTERS = """\
resources:
- name: big
  type: STATIC
  metadata: {filter_metadata: {extproc: {pool: big, model: m-big, version: v1}}}
  load_assignment:
    cluster_name: big
    endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 10.0.0.1, port_value: 8000}}}}]}]
"""
KEY = "sha256:" + "ab" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envoy").mkdir()
    (tmp_path / "envoy" / "clusters.yaml").write_text(CLUSTERS)
    (tmp_path / "keys").write_text("# ours\nsk-file\n" + KEY + "\n")
    monkeypatch.setenv("ACME_KEY", "sk-env")
    return tmp_path


def problems(folder: Path, text: str) -> list[str]:
    (folder / "extproc.yaml").write_text(text)
    try:
        return [str(warning) for warning in load(Path("extproc.yaml")).warnings]
    except ConfigError as error:
        return [str(problem) for problem in error.problems]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "tenants:\n  a: {keys: [sk-plain]}\n",
            "extproc.yaml:2: `tenants.a.keys[0]`: a key does not stand in the file itself; write `sha256:`",
        ),
        ("tenants:\n  a: {keys: ['env:NOPE']}\n", "extproc.yaml:2: the environment has no variable `NOPE`"),
        ("tenants:\n  a: {keys: ['file:nope']}\n", "nope` cannot be read: No such file"),
        ("tenants:\n  a: {}\n", "nobody can be this tenant"),
        (
            f"tenants:\n  a: {{keys: ['{KEY}']}}\n  b: {{keys: ['{KEY}']}}\n",
            "extproc.yaml:3: a key of tenant `b` is a key of tenant `a` too; give each its own",
        ),
        (
            f"tiers: {{gold: {{}}}}\ntenants:\n  a: {{keys: ['{KEY}'], tier: golt}}\n",
            "extproc.yaml:3: there is no tier `golt`; did you mean `gold`? There are: gold",
        ),
        (f"tenants:\n  a: {{keys: ['{KEY}'], route: r}}\n", "extproc.yaml:2: there is no route `r`."),
        ("tenants:\n  a: {clients: [x]}\n", "nothing vouches for the clients of tenant `a`"),
        ("identity: {header: X-Client}\n", "clients could send `X-Client` themselves"),
        (
            "identity: {claims: [sub]}\n",
            "`sub` names no place; write like `envoy.filters.http.jwt_authn:payload.sub`",
        ),
        ("pools:\n  big: {fallback_pool: small}\n", "extproc.yaml:2: there is no pool `small`."),
        ("pools:\n  big: {fallback_pool: big}\n", "pool `big` cannot be its own fallback; name another pool"),
        ("pools:\n  big: {upstream_key: abc}\n", "a secret does not stand in the file itself"),
        ("admission: {preset: fast}\n", "preset"),
        ("admission: {max_wait: 700s}\n", "max_wait"),
        ("schedules:\n- {name: n, begin: '25:00'}\n", "`25:00` is no time of day; write like `22:00`"),
        ("schedules:\n- {name: n, days: [monday]}\n", "`monday` is no day"),
        ("schedules:\n- {name: n, timezone: Mars/Base}\n", "`Mars/Base` is no time zone"),
        ("schedules:\n- {name: n, weights: {r: {v1: 1}}}\n", "extproc.yaml:2: there is no route `r`."),
        ("schedules:\n- {name: n, tenants: {x: {rpm: 1}}}\n", "extproc.yaml:2: there is no tenant `x`."),
        (
            "rate_limits:\n  models: {m-bik: {rpm: 1}}\n",
            "no pool serves model `m-bik` (unless an engine reports an adapter of that name), so this limits "
            "nothing; did you mean `m-big`?",
        ),
    ],
)
def test_mistakes_are_said_with_line_and_remedy(folder: Path, text: str, wanted: str) -> None:
    found = problems(folder, text)
    assert any(wanted in problem for problem in found), found
    assert not any("sk-plain" in problem for problem in found if "keys" not in problem)


def test_keys_come_from_digests_the_environment_and_files(folder: Path) -> None:
    def sha(key: str) -> bytes:
        return hashlib.sha256(key.encode()).digest()

    assert key_digests("env:ACME_KEY") == [sha("sk-env")]
    assert key_digests(f"file:{folder}/keys") == [sha("sk-file"), bytes.fromhex("ab" * 32)]
    assert secret("env:ACME_KEY") == "sk-env"
    with pytest.raises(SecretError, match="NOPE"):
        secret("env:NOPE")


def test_files_of_keys_are_watched_and_no_secret_shows(folder: Path) -> None:
    (folder / "extproc.yaml").write_text(
        "pools: {big: {upstream_key: 'env:ACME_KEY'}}\ntenants: {a: {keys: ['file:keys', 'env:ACME_KEY']}}\n"
    )
    snapshot = load(Path("extproc.yaml"))
    assert snapshot.secret_files == (folder / "keys",)
    assert snapshot.upstream_keys == {"big": "sk-env"}
    assert "sk-env" not in repr(snapshot)


def test_explain_prints_the_values_that_hold(folder: Path) -> None:
    (folder / "extproc.yaml").write_text(
        "admission: {preset: interactive}\n"
        "pools: {big: {admission: {max_wait: 3s}}}\n"
        "routes: [{name: r, match: {model: m-big, header: {X-A: b}}, pool: big, strategy: round-robin}]\n"
        "tiers: {gold: {priority: 5, max_wait: 7s, limits: {rpm: 60}}}\n"
        "tenants: {a: {keys: ['file:keys'], tier: gold, models: m-big}}\n"
        "schedules: [{name: night, begin: 22:00, end: '06:00'}]\n"
    )
    lines = list(explain(load(Path("extproc.yaml"))))
    assert lines[0] == "pool big: preset interactive"
    assert "  max_wait: 3s" in lines
    assert "  max_ttft: 2s" in lines
    tenant = lines.index("tenant a: tier gold, priority 5, weight 1, m-big")
    assert lines[tenant + 1 : tenant + 3] == ["  max_wait: 7s", "  rpm 60"]
    route = lines.index("route r: model m-big, header x-a: b -> pool big")
    assert lines[route + 1] == "  strategy: round-robin"
    assert lines[-1] == "schedule night: mon, tue, wed, thu, fri, sat, sun, 22:00 to 06:00 UTC"


def identity_problems(**said: object) -> list[str]:
    settings = Settings.model_validate(
        {"envoy": {"admin": "127.0.0.1:9901"}, **said}, context={"folder": Path("/etc/gateway")}
    )
    text = (Path(__file__).parent / "fixtures" / "bootstrap.yaml").read_text()
    return [problem.message for problem in lint(read(text, "envoy.yaml"), settings)]


def test_envoy_must_show_what_identity_reads_and_wait_as_long_as_the_queue() -> None:
    assert identity_problems() == []
    (claims,) = identity_problems(identity={"claims": "other.filter:client.name"})
    assert claims.endswith("write `forwarding_namespaces: {untyped: [other.filter]}`")
    (certificate,) = identity_problems(identity={"client_certificate": True})
    assert certificate.startswith("forward_client_cert_details SANITIZE (the default) does not vouch")
    longest = {"pools": {"p": {"admission": {"preset": "batch", "max_wait": "640s"}}}}
    assert identity_problems(**longest) == []
