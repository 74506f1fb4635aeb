"""Settings and clusters become one snapshot, or are refused with what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config.load import load
from extproc.config.problem import ConfigError
from extproc.config.snapshot import Snapshot
from extproc.scheduling import registry


def cluster(name: str, metadata: str, port: int = 8000) -> str:
    return (
        f"- name: {name}\n"
        "  type: STATIC\n"
        f"  metadata: {{filter_metadata: {{extproc: {{{metadata}}}}}}}\n"
        "  load_assignment:\n"
        f"    cluster_name: {name}\n"
        "    endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: "
        f"{{address: 10.0.0.1, port_value: {port}}}}}}}}}]}}]\n"
    )


TWO_VERSIONS = (
    "resources:\n"
    + cluster("a", "pool: llama, model: llama-3-8b, version: v1", 8001)
    + cluster("b", "pool: llama, model: llama-3-8b, version: v2", 8002)
)


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(settings: str | None, clusters: str = TWO_VERSIONS) -> Snapshot:
    if settings is not None:
        Path("extproc.yaml").write_text(settings)
    Path("envoy").mkdir(exist_ok=True)
    Path("envoy/clusters.yaml").write_text(clusters)
    return load(Path("extproc.yaml"))


def problems(settings: str, clusters: str = TWO_VERSIONS) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(settings, clusters)
    return [str(problem) for problem in caught.value.problems]


def warnings(settings: str, clusters: str = TWO_VERSIONS) -> list[str]:
    return [str(problem) for problem in loaded(settings, clusters).warnings]


@pytest.mark.parametrize("settings", [None, "", "# nothing\n"])
def test_without_settings_pools_come_from_the_clusters(settings: str | None) -> None:
    snapshot = loaded(settings)
    assert list(snapshot.pools) == ["llama"]
    assert snapshot.pools["llama"].models == ("llama-3-8b",)
    assert snapshot.default_pool == "llama"
    assert snapshot.model_names() == [("llama-3-8b", "llama")]
    assert snapshot.warnings == ()


def test_settings_and_clusters_are_merged() -> None:
    snapshot = loaded(
        "pools:\n  llama: {models: [big], aliases: {gpt: llama-3-8b}, adapters: lora, strategy: round-robin, "
        "prefill_tokens_per_second: 5000, fallbacks: 2}\n"
    )
    pool = snapshot.pools["llama"]
    assert pool.models == ("big", "llama-3-8b")
    assert (pool.strategy, pool.prefill_rate, pool.fallbacks) == ("round-robin", 5000.0, 2)
    assert dict(snapshot.pool_of_model) == dict.fromkeys(["big", "llama-3-8b", "lora", "gpt"], "llama")


def test_routes_are_taken_over() -> None:
    snapshot = loaded(
        "routes:\n- name: free\n  match: {model: llama-3-8b, header: {X-Tier: free}, path: /v1}\n  pool: "
        "llama\n"
        "  weights: {v1: 90, v2: 10}\n- {name: as-gpt, match: {model: gpt}, pool: llama, model: llama-3-8b}\n"
    )
    free, as_gpt = snapshot.routes
    assert (free.match.models, dict(free.match.headers), free.match.path_prefix) == (
        frozenset({"llama-3-8b"}),
        {"x-tier": "free"},
        "/v1",
    )
    assert dict(free.weights) == {"v1": 90.0, "v2": 10.0}
    assert as_gpt.model == "llama-3-8b"
    assert ("gpt", "llama") in snapshot.model_names()


def test_the_clusters_file_may_be_named_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "extproc.yaml").write_text("envoy: {clusters: engines.yaml}\n")
    (folder / "engines.yaml").write_text(TWO_VERSIONS)
    assert list(load(folder / "extproc.yaml").pools) == ["llama"]
    (folder / "other.yaml").write_text(TWO_VERSIONS.replace("pool: llama", "pool: other"))
    assert list(load(folder / "extproc.yaml", folder / "other.yaml", generation=7).pools) == ["other"]


def test_problems_of_both_files_come_at_once() -> None:
    clusters, settings = problems("scrap: {}\n", "resources:\n- name: a\n  tipe: STATIC\n")
    assert clusters == "envoy/clusters.yaml:3: Envoy's Cluster has no field `tipe`; did you mean `type`?"
    assert settings.startswith(
        "extproc.yaml:1: unknown key `scrap`; did you mean `scrape`? Keys here: pools, routes, "
    )


def test_a_missing_clusters_file_is_a_problem() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^envoy/clusters\.yaml:0: there is no such file; write the engines' clusters into it",
    ):
        load(Path("extproc.yaml"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "routes:\n- name: r\n  pool: lama\n",
            "extproc.yaml:3: route `r` names pool `lama`, which does not exist; did you mean `llama`? "
            "There are: llama",
        ),
        (
            "routes:\n- name: r\n  pool: llama\n  weights: {v1: 90, v3: 10}\n",
            "extproc.yaml:4: route `r` gives weight to version `v3`, which no cluster of pool `llama` "
            "names in its "
            "metadata. There are: v1, v2",
        ),
        (
            "routes:\n- {name: r, pool: llama}\n- {name: r, pool: llama}\n",
            "extproc.yaml:3: route `r` exists already on line 2; choose another name",
        ),
        (
            "pools:\n  llama:\n    aliases:\n      llama-3-8b: llama-3-8b\n",
            "extproc.yaml:4: alias `llama-3-8b` is also a model or adapter of pool `llama`; remove one of "
            "them",
        ),
        ("default_pool: x\n", "extproc.yaml:1: there is no pool `x`. There are: llama"),
        (
            "pools:\n  llama:\n    strategy: round-robbin\n",
            "extproc.yaml:3: unknown strategy `round-robbin`; did you mean `round-robin`? There are: "
            + ", ".join(sorted(registry.NAMES)),
        ),
        (
            "pools:\n  llama:\n    strategy: round-robin\n    options: {x: 1}\n",
            "extproc.yaml:4: strategy round-robin has no option x",
        ),
        (
            "routes:\n- name: r\n  pool: llama\n  options: {x: 1}\n",
            "extproc.yaml:4: route `r` has `options` but no `strategy` that they are for; add `strategy:`",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: str, message: str) -> None:
    assert problems(settings) == [message]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "pools:\n  lama: {models: x}\n",
            "extproc.yaml:2: warning: no cluster names pool `lama` in its metadata, so it has no "
            "endpoints; did you mean "
            "`llama`?",
        ),
        (
            "pools:\n  llama:\n    aliases: {gpt: llama-3-8}\n",
            "extproc.yaml:3: warning: alias `gpt` stands for `llama-3-8`, which pool `llama` does not "
            "serve unless an "
            "engine reports an adapter of that name; did you mean `llama-3-8b`?",
        ),
        (
            "routes:\n- {name: r, match: {model: gpt}, pool: llama}\n",
            "extproc.yaml:2: warning: route `r` matches model `gpt`, which pool `llama` does not serve, so "
            "such requests "
            "get a 404 unless an engine reports an adapter of that name; add an alias to the pool, or "
            "`model:` to the "
            "route",
        ),
        (
            "routes:\n- {name: r, pool: llama, model: llama-3}\n",
            "extproc.yaml:2: warning: route `r` puts in model `llama-3`, which pool `llama` does not serve "
            "unless an "
            "engine reports an adapter of that name; did you mean `llama-3-8b`?",
        ),
        (
            "listen:\n  admin: 0.0.0.0:9902\n",
            "extproc.yaml:2: warning: `admin: 0.0.0.0:9902` can be reached from other machines, so "
            "requests that change "
            "something are refused; add `admin_token_file` to allow them with a token",
        ),
    ],
)
def test_what_is_odd_but_usable_is_a_warning(settings: str, message: str) -> None:
    assert warnings(settings) == [message]


def test_a_version_without_clusters_may_have_no_weight() -> None:
    assert warnings("routes:\n- {name: r, pool: llama, weights: {v1: 1, v3: 0}}\n") == []


TWO_POOLS = (
    "resources:\n" + cluster("a", "pool: gold, model: m", 8001) + cluster("b", "pool: iron, model: m", 8002)
)


def test_a_model_of_two_pools_needs_someone_to_say_which() -> None:
    assert problems("pools:\n  gold:\n    fallbacks: 2\n", TWO_POOLS) == [
        "extproc.yaml:2: model `m` is served by pools `gold` and `iron`, and no route says which of them "
        "answers: add a "
        "route with `match: {model: m}` and a pool, or set `default_pool` to one of them, or make them "
        "versions of one "
        "pool"
    ]


@pytest.mark.parametrize(
    "settings",
    [
        "default_pool: iron\n",
        "routes: [{name: r, match: {model: m}, pool: iron}]\n",
        "routes: [{name: g, match: {header: {X-Tier: gold}}, pool: gold}, {name: r, pool: iron}]\n",
    ],
)
def test_a_route_or_the_default_pool_says_which(settings: str) -> None:
    assert warnings(settings, TWO_POOLS) == []
