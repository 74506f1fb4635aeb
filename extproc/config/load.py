"""Files -> Snapshot."""

from __future__ import annotations

import os
from pathlib import Path

from extproc.config.clusters import Clusters, read_clusters
from extproc.config.problem import ConfigError, Problem
from extproc.config.registered import with_registered
from extproc.config.schema import Settings
from extproc.config.snapshot import Snapshot, build
from extproc.config.validation import settings_from
from extproc.config.yaml_source import Document, read, read_file


def load(config_path: Path, clusters_path: Path | None = None, *, generation: int = 1) -> Snapshot:
    """Read ``extproc.yaml`` and the clusters file it names (or ``clusters_path``), and check them together.
    Endpoints that were registered at run time (in the state folder) are among the clusters.

    An absent ``config_path`` means all defaults. Relative paths inside it are meant from its folder.

    Raises:
        ConfigError: with all problems of both files.
    """
    problems: list[Problem] = []
    document, settings = load_settings(config_path, problems)
    clusters = load_clusters(clusters_path or clusters_path_of(document, settings, config_path), problems)
    if settings is None or clusters is None:
        raise ConfigError(problems)
    clusters = with_registered(clusters, settings.state_dir)
    try:
        return build(settings, clusters, generation, document=document)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error


def load_settings(config_path: Path, problems: list[Problem]) -> tuple[Document, Settings | None]:
    """The settings alone; what is wrong with them is added to ``problems``."""
    name = shown_path(config_path)
    document = Document(name, {})
    try:
        document = read_file(config_path, name) if config_path.exists() else read("", name)
        return document, settings_from(document, config_path.absolute().parent)
    except ConfigError as error:
        problems.extend(error.problems)
        return document, None


def load_clusters(clusters_path: Path, problems: list[Problem]) -> Clusters | None:
    """The clusters alone; what is wrong with them is added to ``problems``."""
    if not clusters_path.exists():
        message = (
            "there is no such file; write the engines' clusters into it, as a list under `resources:` "
            "(docs/envoy.md shows one), or name the file that has them: `envoy: {clusters: PATH}` in extproc.yaml"
        )
        problems.append(Problem(shown_path(clusters_path), 0, message))
        return None
    try:
        document = read_file(clusters_path, shown_path(clusters_path))
        return read_clusters(document, clusters_path.absolute().parent)
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def shown_path(path: Path) -> str:
    """A file's name in problems: relative to the working directory where it lies below it."""
    absolute = os.path.normpath(path.absolute())
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative


def clusters_path_of(document: Document, settings: Settings | None, config_path: Path) -> Path:
    """Where the clusters are, even when the settings are wrong elsewhere: both files' problems are wanted
    at once."""
    if settings is not None:
        return settings.envoy.clusters
    envoy = document.data.get("envoy")
    said = envoy.get("clusters") if isinstance(envoy, dict) else None
    default = str(Settings.model_fields["envoy"].default.clusters)
    return config_path.absolute().parent / (said if isinstance(said, str) and said else default)
