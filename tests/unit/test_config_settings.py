"""extproc.yaml: what may be written, what it means, and what is said about mistakes."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import reference
from extproc.config.problem import ConfigError
from extproc.config.schema import Settings
from extproc.config.schema.base import show_bytes, show_seconds
from extproc.config.schema.settings import START_ONLY
from extproc.config.validation import settings_from
from extproc.config.yaml_source import Document, read

FOLDER = Path("/etc/gateway")


def given_yaml(text: str) -> Settings:
    return settings_from(read(text, "extproc.yaml"), FOLDER)


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        given_yaml(text)
    return [str(problem) for problem in caught.value.problems]


def test_an_empty_file_is_all_defaults() -> None:
    settings_ = given_yaml("")
    assert settings_.limits.max_body_bytes == 67_108_864
    assert settings_.limits.message_bytes == 67_108_864 + 1_048_576
    assert settings_.removal.drain_deadline == 600.0
    assert settings_.feedback == "access_log"
    assert settings_.listen.admin == "127.0.0.1:9902"
    assert settings_.pools == {}


def test_empty_sections_are_defaults_too() -> None:
    assert given_yaml("scrape:\npools:\n  llama:\nroutes:\n").pools["llama"].fallbacks == 1


def test_relative_paths_are_meant_from_the_files_folder() -> None:
    settings_ = given_yaml(
        "state_dir: state\ndecisions: {log: /var/log/d.jsonl}\nlisten: {grpc: 'unix:run/x.sock'}\n"
    )
    assert settings_.envoy.clusters == FOLDER / "envoy/clusters.yaml"
    assert settings_.state_dir == FOLDER / "state"
    assert settings_.decisions.log == Path("/var/log/d.jsonl")
    assert settings_.listen.grpc == "unix:/etc/gateway/run/x.sock"


@pytest.mark.parametrize(
    ("written", "seconds"), [("1s", 1), ("500ms", 0.5), ("10m", 600), ("2h", 7200), ("0.5", 0.5)]
)
def test_durations(written: str, seconds: float) -> None:
    assert given_yaml(f"scrape: {{interval: {written}}}").scrape.interval == seconds


@pytest.mark.parametrize(
    ("written", "size"), [("64MiB", 2**26), ("512KiB", 2**19), ("1GB", 10**9), ("4096", 4096)]
)
def test_sizes(written: str, size: int) -> None:
    assert given_yaml(f"limits: {{max_body_bytes: {written}}}").limits.max_body_bytes == size


def test_routes_as_people_write_them() -> None:
    settings_ = given_yaml(
        """
pools:
  llama: {models: llama-3-8b, aliases: {gpt-4o-mini: llama-3-8b}}
routes:
- name: free
  match: {model: [llama-3-8b, gpt-4o-mini], header: {X-Tenant-Tier: free}, path: /v1}
  pool: llama
  strategy: round-robin
  weights: {v1: 90, 1.10: 10}
  rate_limit: {rpm: 60, tpm: 100000}
"""
    )
    route = settings_.routes[0]
    assert settings_.pools["llama"].models == ("llama-3-8b",)
    assert route.match.model == ("llama-3-8b", "gpt-4o-mini")
    assert route.match.header == {"X-Tenant-Tier": "free"}
    assert route.weights == {"v1": 90.0, "1.10": 10.0}
    assert route.rate_limit is not None
    assert (route.rate_limit.rpm, route.rate_limit.tpm) == (60, 100_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scrape:\n  intervall: 1s\n",
            "extproc.yaml:2: unknown key `intervall` in `scrape`; did you mean `interval`? "
            "Keys here: interval, timeout, max_bytes",
        ),
        (
            "pools:\n  a:\n    xyz: 1\n",
            "extproc.yaml:3: unknown key `xyz` in `pools.a`. Keys here: models, aliases, adapters, "
            "strategy, options, "
            "prefill_tokens_per_second, fallbacks, tokenizer, "
            "disaggregation, admission, fallback_pool, upstream_key, warm_up, "
            "release, shadow",
        ),
        (
            "scrape:\n  interval: fast\n",
            "extproc.yaml:2: `scrape.interval`: `fast` is no duration; write like `500ms`, `1s`, `10m`, or "
            "a number "
            "of seconds",
        ),
        ("scrape: {interval: 1ms}\n", "extproc.yaml:1: `scrape.interval` must be at least 0.1, not `1ms`"),
        (
            "limits:\n  max_body_bytes: 64 megs\n",
            "extproc.yaml:2: `limits.max_body_bytes`: `64 megs` is no size; write like `64MiB`, `512KiB`, "
            "or a number "
            "of bytes",
        ),
        (
            "responses:\n  headers: yes\n",
            "extproc.yaml:2: `responses.headers` must be true or false, not `yes`",
        ),
        (
            "limits: {max_streams: 1.5}\n",
            "extproc.yaml:1: `limits.max_streams` must be a whole number, not `1.5`",
        ),
        (
            "limits: {max_streams: '5'}\n",
            "extproc.yaml:1: `limits.max_streams` must be a whole number, not `5`",
        ),
        (
            "feedback: acces_log\n",
            "extproc.yaml:1: `feedback` must be `access_log` or `stream`, not `acces_log`; did you mean "
            "`access_log`?",
        ),
        (
            "scrape: 5\n",
            "extproc.yaml:1: `scrape` must be a mapping (`key: value` lines, indented), not `5`",
        ),
        ("routes: {a: 1}\n", "extproc.yaml:1: `routes`: must be a list; begin each item with `- `"),
        ("routes:\n- name: r\n", "extproc.yaml:2: `routes[0].pool` is missing; add it: Pool that answers"),
        (
            "routes:\n- name: r\n  pool: p\n  match:\n    header:\n      X-Canary: true\n",
            "extproc.yaml:6: `routes[0].match.header.X-Canary` must be text, not `true`; put it in quotes",
        ),
        (
            "routes:\n- {name: r, pool: p, match: {header: {x-gateway-cluster: a}}}\n",
            "extproc.yaml:2: `routes[0].match.header`: `x-gateway-cluster` is the gateway's own and "
            "removed from client "
            "requests; use another header",
        ),
        (
            "routes:\n- {name: r, pool: p, match: {path: v1}}\n",
            "extproc.yaml:2: `routes[0].match.path`: `v1` matches no path; begin it with `/`",
        ),
        (
            "routes:\n- {name: r, pool: p, weights: {v1: 0}}\n",
            "extproc.yaml:2: `routes[0]`: `weights` of route `r` are all 0; give one version a share above 0",
        ),
        (
            "listen:\n  grpc: 0.0.0.0:9002\n",
            "extproc.yaml:1: `listen`: `grpc: 0.0.0.0:9002` can be reached from other machines: use a Unix "
            "socket or "
            "127.0.0.1, or add `grpc_tls`, or `grpc_allow_remote: true` where the network is trusted",
        ),
        (
            "listen: {admin: ':80'}\n",
            "extproc.yaml:1: `listen.admin`: `:80` is not an address; write `HOST:PORT` or `unix:PATH`",
        ),
        (
            "listen: {admin: '::1:80'}\n",
            "extproc.yaml:1: `listen.admin`: `::1:80` is not an address; write IPv6 in brackets, as in "
            "`[::1]:9002`",
        ),
        (
            "listen: {admin: 'a:99999'}\n",
            "extproc.yaml:1: `listen.admin`: `99999` is not a port; write a number from 1 to 65535",
        ),
        (
            "listen: {grpc: 'unix:'}\n",
            "extproc.yaml:1: `listen.grpc`: the socket's path is missing; write "
            "`unix:envoy/live/extproc.sock`",
        ),
        (
            "health: {backoff: 10s, max_backoff: 5s}\n",
            "extproc.yaml:1: `health`: `max_backoff` is shorter than `backoff`; make it at least as long",
        ),
        ("default_pool: ''\n", "extproc.yaml:1: `default_pool` is empty; write a name"),
    ],
)
def test_mistakes_are_said_with_line_and_remedy(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_all_mistakes_are_said_at_once() -> None:
    assert [
        line.split(": ")[0] for line in problems("a: 1\nscrape:\n  b: 1\n  interval: x\nfeedback: y\n")
    ] == [
        "extproc.yaml:1",
        "extproc.yaml:3",
        "extproc.yaml:4",
        "extproc.yaml:5",
    ]


@pytest.mark.parametrize(
    "word", ["grpc_allow_remote: true", "grpc_tls: {cert: c.pem, key: k.pem, client_ca: a.pem}"]
)
def test_a_remote_grpc_address_needs_a_word(word: str) -> None:
    assert given_yaml(f"listen: {{grpc: '0.0.0.0:9002', {word}}}").listen.grpc == "0.0.0.0:9002"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        given_yaml("").feedback = "stream"  # type: ignore[misc]


def test_the_reference_is_what_the_schema_says() -> None:
    assert reference.main(["--check"]) == 0, "run `python -m extproc.config.reference`"


@pytest.mark.parametrize("name", START_ONLY)
def test_what_is_taken_at_start_is_a_key_and_says_so_in_the_reference(name: str) -> None:
    value: object = Settings()
    for step in name.split("."):
        value = getattr(value, step)
    above, _, key = name.rpartition(".")
    table = reference.render().partition(f"## `{above}`\n" if above else "## Top level\n")[2]
    row = next(line for line in table.splitlines() if line.startswith(f"| `{key}` |"))
    assert "Taken at start" in row


def test_every_key_has_a_meaning_in_the_reference() -> None:
    rows = [line.split(" | ") for line in reference.render().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if len(row[-1].strip(" |")) < 5] == []


@given(st.floats(0, 1e6), st.integers(0, 2**40))
def test_shown_durations_and_sizes_can_be_written(seconds: float, size: int) -> None:
    seconds = round(seconds, 3)
    written = given_yaml(
        f"removal: {{drain_deadline: {show_seconds(seconds)}}}\nlimits: {{max_body_bytes: "
        f"{show_bytes(size + 1)}}}"
    )
    assert written.removal.drain_deadline == pytest.approx(seconds, rel=1e-5)
    assert written.limits.max_body_bytes == size + 1


keys = st.sampled_from([*Settings.model_fields, "models", "match", "header", "grpc", "x"])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(keys, values, max_size=5))
def test_no_content_raises_anything_but_config_errors(data: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        settings_from(Document("extproc.yaml", data), FOLDER)
