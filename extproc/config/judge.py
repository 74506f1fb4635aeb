"""Let the Envoy binary judge a configuration, with the engine clusters that it would get later from a file.

``envoy --mode validate`` ignores xDS files, so a copy of the bootstrap is judged in which the clusters are
static.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from extproc.config.clusters import Clusters
from extproc.config.problem import Problem
from extproc.config.yaml_source import Document, NodePath

TIMEOUT_S = 30.0
_ERROR = re.compile(r"error initializing configuration '[^']*': (.*)", re.DOTALL)
_PLACE = re.compile(r"@ ([A-Za-z0-9_.\[\]<>]+)")
_NEAR = re.compile(r",? ?near \d+:\d+ \(offset \d+\)")
_QUOTED = re.compile(r"'([A-Za-z0-9_./:@-]{3,200})'")


def judge(
    bootstrap: Document, folder: Path, clusters: Clusters | None, clusters_file: str, binary: str
) -> list[Problem]:
    """Run ``binary`` on the whole. ``folder``: where Envoy is started, which relative paths are meant from.

    Returns at most one problem: Envoy stops at the first.
    """
    whole = copy.deepcopy(bootstrap.data)
    own = _embed(whole, clusters)
    with tempfile.TemporaryDirectory(prefix="extproc-check-") as room:
        file = Path(room) / "envoy.json"
        file.write_text(json.dumps(whole))
        command = [binary, "--mode", "validate", "--log-level", "error", "-c", str(file)]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=False, text=True
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return [Problem(bootstrap.file, 0, f"could not be judged by `{binary}`: {error}", fatal=False)]
    if done.returncode == 0:
        return []
    return [_problem(done.stderr + done.stdout, bootstrap, clusters, clusters_file, own)]


def _embed(whole: dict[str, Any], clusters: Clusters | None) -> int:
    """Put the engine clusters into the bootstrap in place of their file; the number of its own clusters."""
    static = whole.get("static_resources")
    if not isinstance(static, dict):
        static = whole["static_resources"] = {}
    present = static.get("clusters")
    present = list(present) if isinstance(present, list) else []
    names = {item.get("name") for item in present if isinstance(item, dict)}
    added = []
    for resource in clusters.resources if clusters is not None else ():
        if resource.get("name") not in names:
            added.append({key: value for key, value in resource.items() if key != "@type"})
    static["clusters"] = [*present, *added]
    dynamic = whole.get("dynamic_resources")
    if isinstance(dynamic, dict):
        dynamic.pop("cds_config", None)
    return len(present)


def _problem(
    output: str, bootstrap: Document, clusters: Clusters | None, clusters_file: str, own: int
) -> Problem:
    found = _ERROR.search(output)
    text = found[1] if found else output
    text = _NEAR.sub("", " ".join(text.split("): {")[0].split()))
    place = _PLACE.search(text)
    reason = text[place.end() :].removesuffix("has unknown fields").strip(" :") if place else text
    if reason.count(")") > reason.count("("):
        reason = reason.removesuffix(")")
    message = f"Envoy refuses this: {reason[:600] or 'it gave no reason'}"
    path = _path(place[1]) if place else ()
    names = list(clusters.names.items()) if clusters is not None else []
    if path[:2] == ("static_resources", "clusters") and len(path) > 2:
        index = path[2]
        if isinstance(index, int) and index >= own and index - own < len(names):
            return Problem(clusters_file, names[index - own][1], message)
    words = _QUOTED.findall(text)
    for name, named_at in names:
        if name in words:
            return Problem(clusters_file, named_at, message)
    for word in words:
        line = _find(bootstrap, path, word)
        if line is not None:
            return Problem(bootstrap.file, line, message)
    return bootstrap.problem(path, message) if path else Problem(bootstrap.file, 0, message)


def _path(text: str) -> NodePath:
    """``static_resources.clusters[0].name`` as steps, up to where a typed extension begins."""
    steps: list[str | int] = []
    for part in text.rstrip(".").split("."):
        name, *indexes = part.replace("]", "").split("[")
        if name == "<any>":
            break
        steps.append(name)
        steps.extend(int(index) for index in indexes if index.isdigit())
    return tuple(steps)


def _find(document: Document, below: NodePath, word: str) -> int | None:
    """Line of the first key or value ``word`` at or below a path."""
    data: Any = document.data
    for step in below:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            return None
    for path, value in _walk(data, below):
        if value == word or (path and path[-1] == word):
            return document.line(path)
    return None


def _walk(data: Any, path: NodePath) -> Iterator[tuple[NodePath, Any]]:
    yield path, data
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _walk(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _walk(value, (*path, index))
