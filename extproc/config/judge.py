"""Let the Envoy binary judge a configuration, with the engine clusters that it would get later from a file.

``envoy --mode validate`` ignores xDS files, so a copy of the bootstrap is judged in which the clusters are
static.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from extproc.config.clusters import Clusters
from extproc.config.problem import Problem
from extproc.config.yaml_source import Document, NodePath

TIMEOUT_S = 30.0
_ERROR = re.compile(r"error initializing configuration '[^']*': (.*)", re.DOTALL)
_PLACE = re.compile(r"@ ([A-Za-z0-9_.\[\]<>]+)")
_NEAR = re.compile(r",? ?near \d+:\d+ \(offset \d+\)")
_DUMP = "goo.gle/debug"
"""Begins Envoy's print of a whole message; the reason comes after its last line."""
_WRAPPED = re.compile(r"Protobuf message \(type \S+ reason (?:[A-Z_]+: )?(.*)\) has unknown fields")
_CONSTRAINT = re.compile(r"Proto constraint validation failed \((.*)\)")
_CAUSE = re.compile(r"(\w+)ValidationError\.(\w+)(?:\[(\d+)\])?: (.*)")
_LONGEST = 300
_QUOTED = re.compile(r"'([A-Za-z0-9_./:@-]{3,200})'")


def judge(
    bootstrap: Document, folder: Path, clusters: Clusters | None, clusters_file: str, binary: str
) -> list[Problem]:
    """Run ``binary`` on the whole. ``folder``: where Envoy is started, which relative paths are meant from.

    Returns at most one problem: Envoy stops at the first.
    """
    judged = partial(_run, binary, folder, bootstrap.data)
    engines = list(clusters.resources) if clusters is not None else []
    try:
        refusal = judged(engines)
        if refusal is None:
            return []
        reason, path = reason_in(refusal)
        message = f"Envoy refuses this: {_short(reason) or 'it gave no reason'}"
        if engines and clusters is not None and judged([]) is None:
            culprit = _culprit(judged, engines)
            return [Problem(clusters_file, clusters.names.get(str(culprit.get("name")), 0), message)]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Problem(bootstrap.file, 0, f"could not be judged by `{binary}`: {error}", fatal=False)]
    for word in _QUOTED.findall(reason):
        line = _find(bootstrap, path, word)
        if line is not None:
            return [Problem(bootstrap.file, line, message)]
    return [bootstrap.problem(path, message) if path else Problem(bootstrap.file, 0, message)]


def _run(
    binary: str, folder: Path, bootstrap: dict[str, Any], engines: Sequence[dict[str, Any]]
) -> str | None:
    """What Envoy says against the bootstrap with these engine clusters; None: nothing."""
    with tempfile.TemporaryDirectory(prefix="extproc-check-") as room:
        file = Path(room) / "envoy.json"
        file.write_text(json.dumps(_whole(bootstrap, engines)))
        command = [binary, "--mode", "validate", "--log-level", "error", "-c", str(file)]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=TIMEOUT_S, check=False, text=True
        )
    return None if done.returncode == 0 else done.stderr + done.stdout


def _whole(bootstrap: dict[str, Any], engines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The bootstrap with the engine clusters in place of their file."""
    whole = dict(bootstrap)
    static = _mapping(whole.get("static_resources"))
    clusters = static.get("clusters")
    present = clusters if isinstance(clusters, list) else []
    names = {item.get("name") for item in present if isinstance(item, dict)}
    added = [
        {key: value for key, value in engine.items() if key != "@type"}
        for engine in engines
        if engine.get("name") not in names
    ]
    whole["static_resources"] = {**static, "clusters": [*present, *added]}
    dynamic = _mapping(whole.get("dynamic_resources"))
    if dynamic.pop("cds_config", None) is not None:
        whole["dynamic_resources"] = dynamic
    return whole


def _mapping(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _culprit(
    judged: Callable[[Sequence[dict[str, Any]]], str | None], engines: list[dict[str, Any]]
) -> dict[str, Any]:
    """The first cluster that Envoy refuses, found by halves: few of its messages name it."""
    while len(engines) > 1:
        half = engines[: len(engines) // 2]
        engines = half if judged(half) is not None else engines[len(half) :]
    return engines[0]


def reason_in(output: str) -> tuple[str, NodePath]:
    """Envoy's reason, and the place it names, if any."""
    found = _ERROR.search(output)
    text = found[1] if found else output
    if _DUMP in text:
        text = text.rpartition("\n: ")[2]
    text = _NEAR.sub("", " ".join(text.split("): {")[0].split()))
    wrapped, constraint = _WRAPPED.fullmatch(text), _CONSTRAINT.fullmatch(text)
    if constraint is not None:
        return _constraint(constraint[1])
    text = wrapped[1] if wrapped is not None else text
    place = _PLACE.search(text)
    if place is None:
        return text, ()
    reason = text[place.end() :].strip(" :")
    if reason.count(")") > reason.count("("):
        reason = reason.removesuffix(")")
    return reason, _path(place[1])


def _constraint(chain: str) -> tuple[str, NodePath]:
    """``BootstrapValidationError.Admin: … | caused by AdminValidationError.Address: too long``: the last word on it, and
    the way there, where the chain begins at the bootstrap itself."""
    causes = [_CAUSE.fullmatch(part) for part in chain.split(" | caused by ")]
    last = causes[-1]
    if last is None:
        return chain, ()
    steps: list[str | int] = []
    for cause in causes:
        if cause is None:
            return last[4], ()
        steps.append(re.sub(r"(?<=.)(?=[A-Z])", "_", cause[2]).lower())
        if cause[3]:
            steps.append(int(cause[3]))
    whole = causes[0] is not None and causes[0][1] == "Bootstrap"
    key = next(step for step in reversed(steps) if isinstance(step, str))
    return f"`{key}`: {last[4]}", tuple(steps) if whole else ()


def _short(reason: str) -> str:
    """Its end, where it is long: Envoy says last what it is about."""
    return reason if len(reason) <= _LONGEST else "…" + reason[-_LONGEST:]


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
    for path, value in walk(data, below):
        if value == word or (path and path[-1] == word):
            return document.line(path)
    return None


def walk(data: Any, path: NodePath) -> Iterator[tuple[NodePath, Any]]:
    """Every value at or below ``data``, with its path."""
    yield path, data
    if isinstance(data, dict):
        for key, value in data.items():
            yield from walk(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from walk(value, (*path, index))
