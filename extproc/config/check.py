"""``extproc check``: everything that is wrong with a configuration, before anything runs."""

from __future__ import annotations

from pathlib import Path

from extproc.config.clusters import Clusters, read_clusters
from extproc.config.judge import judge, walk
from extproc.config.lint import lint
from extproc.config.load import clusters_path_of, load_clusters, load_settings, shown_path
from extproc.config.node import Node
from extproc.config.problem import ConfigError, Problem
from extproc.config.salvage import salvage
from extproc.config.schema import Settings
from extproc.config.snapshot import build
from extproc.config.yaml_source import Document, read_file

_ENOUGH_RETRIES = 100


def check(
    config_path: Path, envoy_yaml_path: Path | None = None, *, envoy_binary: str | None = None
) -> list[Problem]:
    """All problems of ``extproc.yaml``, the clusters file it names and Envoy's bootstrap, warnings included.

    ``envoy_binary``: judge the whole with it too. Nothing is raised; only a temporary folder is written to.
    """
    problems: list[Problem] = []
    document, settings = load_settings(config_path, problems)
    clusters_path = clusters_path_of(document, settings, config_path)
    clusters = load_clusters(clusters_path, problems)
    rest = salvage(document, config_path.absolute().parent) if settings is None else None
    if settings is not None and clusters is not None:
        try:
            problems += build(settings, clusters, document=document).warnings
        except ConfigError as error:
            problems += error.problems
    elif rest is not None and clusters is not None:
        try:
            build(rest.settings, clusters, document=document)
        except ConfigError as error:
            problems += [problem for problem in error.problems if rest.sure(problem)]
    if clusters is not None:
        problems += _retries(clusters, shown_path(clusters_path))
    if envoy_yaml_path is not None:
        bootstrap = _read(envoy_yaml_path, problems)
        if bootstrap is not None:
            if settings is None:
                folder = config_path.absolute().parent
                defaults = Settings.model_validate({}, context={"folder": folder})
                settings = rest.settings if rest is not None else defaults
            ports = _ports(bootstrap)
            problems += ports
            problems += lint(bootstrap, settings, clusters.names if clusters is not None else ())
            problems += _static_engines(bootstrap, clusters_path, envoy_yaml_path)
            if envoy_binary is not None and not ports:
                folder = envoy_yaml_path.absolute().parent
                problems += judge(bootstrap, folder, clusters, shown_path(clusters_path), envoy_binary)
    return sorted(set(problems))


def _read(path: Path, problems: list[Problem]) -> Document | None:
    try:
        return read_file(path, shown_path(path))
    except ConfigError as error:
        problems += error.problems
        return None


def _ports(bootstrap: Document) -> list[Problem]:
    """Ports that there are not: Envoy names neither the line nor the value."""
    return [
        bootstrap.problem(path, f"`port_value` must be a whole number from 1 to 65535, not `{value}`")
        for path, value in walk(bootstrap.data, ())
        if path and path[-1] in ("port_value", "portValue") and isinstance(value, int) and value > 65_535
    ]


def _retries(clusters: Clusters, file: str) -> list[Problem]:
    """Circuit breakers that people wrote themselves; absent ones are completed when the file is published."""
    found = []
    for resource in clusters.resources:
        name = str(resource.get("name"))
        document = Document(file, {})
        for threshold in Node(document, (), resource).at("circuit_breakers", "thresholds").items():
            retries = threshold.at("max_retries").number
            if retries is not None and retries < _ENOUGH_RETRIES:
                found.append(
                    Problem(
                        file,
                        clusters.names[name],
                        f"cluster `{name}` allows {retries:g} retries at once, so a dead first choice "
                        "becomes an error "
                        "under load; write `max_retries: 1000` (extproc keeps the retry budget)",
                    )
                )
    return found


def _static_engines(bootstrap: Document, clusters_path: Path, envoy_yaml_path: Path) -> list[Problem]:
    """Engine clusters in the bootstrap itself: nobody completes those, so everything must be written out."""
    clusters = Node(bootstrap, (), bootstrap.data).at("static_resources", "clusters")
    engines = [item for item in clusters.items() if item.at("metadata", "filter_metadata", "extproc")]
    if not engines:
        return []
    found = []
    for cluster in engines:
        thresholds = cluster.at("circuit_breakers", "thresholds").items()
        retries = [item.at("max_retries") for item in thresholds if not item.at("retry_budget")]
        short = [item for item in retries if item.number is None or item.number < _ENOUGH_RETRIES]
        if not thresholds or short:
            place = short[0] if short else cluster.at("circuit_breakers")
            found.append(
                place.problem(
                    f"cluster `{cluster.at('name').text}` allows {place.text or '3 (the default)'} retries "
                    "at once, so a "
                    "dead first choice becomes an error under load; write `circuit_breakers: {thresholds: "
                    "[{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000, "
                    "max_retries: 1000}]}`"
                )
            )
    if envoy_yaml_path.absolute() == clusters_path.absolute():
        return found  # its clusters have been read as the clusters file
    try:
        found += read_clusters(bootstrap, envoy_yaml_path.absolute().parent).warnings
    except ConfigError as error:
        found += error.problems
    return found
