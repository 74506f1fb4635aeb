"""``metadata.filter_metadata.extproc``: what a cluster, or one endpoint of it, says to us."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from extproc.config import envoy_message
from extproc.config.problem import Problem
from extproc.config.yaml_source import Document, NodePath
from extproc.engines.registry import ENGINES
from extproc.fleet.endpoint import EndpointSpec, Role

NAMESPACE = "extproc"


@dataclass(slots=True, frozen=True)
class ClusterSettings:
    """The keys of the metadata, with their defaults."""

    pool: str = ""
    model: tuple[str, ...] = ()
    version: str = ""
    engine: str = "vllm"
    weight: float = 1.0
    max_concurrency: int | None = None
    kv_events_port: int | None = None
    kv_replay_port: int | None = None
    metrics_path: str | None = None
    metrics_port: int | None = None
    dcgm_url: str | None = None
    dcgm_gpus: tuple[str, ...] = ()
    role: Role = Role.BOTH
    state: str = "ready"
    keep_alive_s: float = 5.0
    """How long the engine keeps an idle connection (vLLM: 5 s)."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def spec(self, cluster: str, address: str, tls: bool, locality: str) -> EndpointSpec:
        """The endpoint these settings describe."""
        return EndpointSpec(
            cluster=cluster,
            address=address,
            pool=self.pool,
            models=self.model,
            version=self.version,
            engine=self.engine,
            weight=self.weight,
            max_concurrency=self.max_concurrency,
            role=self.role,
            draining=self.state == "draining",
            metrics_path=self.metrics_path,
            metrics_port=self.metrics_port,
            tls=tls,
            kv_events_port=self.kv_events_port,
            kv_replay_port=self.kv_replay_port,
            dcgm_url=self.dcgm_url,
            dcgm_gpus=self.dcgm_gpus,
            locality=locality,
            labels=self.labels,
        )


def read_settings(
    document: Document, item: object, path: NodePath, inherited: ClusterSettings, problems: list[Problem]
) -> tuple[ClusterSettings, bool]:
    """``inherited`` overridden by the metadata of ``item`` (cluster or endpoint), and whether it has any.

    Faults are added to ``problems``.
    """
    value: object = item
    for step in ("metadata", "filter_metadata", NAMESPACE):
        key, value = envoy_message.field(value, step)
        path = (*path, key)
    if value is None:
        return inherited, False
    if not isinstance(value, dict):
        problems.append(
            document.problem(path, "must hold keys with values, such as {pool: NAME, model: NAME}")
        )
        return inherited, True
    read: dict[str, Any] = {}
    for key, given in value.items():
        reader = _READERS.get(key)
        if reader is None:
            hint = envoy_message.did_you_mean(key, list(_READERS))
            problems.append(
                document.problem((*path, key), f"unknown key `{key}` in the extproc metadata{hint}")
            )
            continue
        try:
            read[key] = reader(given)
        except ValueError as error:
            hint = envoy_message.did_you_mean(str(given), list(ENGINES)) if key == "engine" else ""
            problems.append(
                document.problem((*path, key), f"`{key}` must be {error}, not `{str(given)[:60]}`{hint}")
            )
    return replace(inherited, **read), True


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text")
    return value


def _engine(value: object) -> str:
    if not isinstance(value, str) or value not in ENGINES:
        raise ValueError(f"one of {', '.join(ENGINES)}")
    return value


def _version(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return _text(value)


def _names(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError("a name or a list of names")
    return tuple(items)


def _above_zero(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError("a number above 0 (to take an endpoint out, write `state: draining`)")
    return float(value)


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 86_400:
        raise ValueError("seconds above 0")
    return float(value)


def _whole(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return read


def _path(value: object) -> str:
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError("a path that begins with /")
    return value


def _url(value: object) -> str:
    wanted = ValueError("a URL such as http://10.0.0.1:9400/metrics (without user, password or #)")
    if not isinstance(value, str):
        raise wanted
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise wanted from None
    readable = parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not readable or parts.username is not None or parts.fragment or re.search(r"[\s\x00-\x1f]", value):
        raise wanted
    return value


def _gpus(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if not items or any(isinstance(item, bool) or not isinstance(item, (int, str)) for item in items):
        raise ValueError("a list of GPUs by number or UUID, such as [0, 1]")
    return tuple(str(item) for item in items)


def _role(value: object) -> Role:
    try:
        return Role(str(value))
    except ValueError:
        raise ValueError("both, prefill or decode") from None


def _state(value: object) -> str:
    if value not in ("ready", "draining"):
        raise ValueError("ready or draining")
    return str(value)


def _labels(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or any(isinstance(item, (dict, list)) for item in value.values()):
        raise ValueError("names with values, such as {gpu: h100}")
    return {str(key): "" if item is None else str(item) for key, item in value.items()}


_READERS: dict[str, Callable[[object], object]] = {
    "pool": _text,
    "model": _names,
    "version": _version,
    "engine": _engine,
    "weight": _above_zero,
    "max_concurrency": _whole(1, 1_000_000),
    "kv_events_port": _whole(1, 65_535),
    "kv_replay_port": _whole(1, 65_535),
    "metrics_path": _path,
    "metrics_port": _whole(1, 65_535),
    "dcgm_url": _url,
    "dcgm_gpus": _gpus,
    "role": _role,
    "state": _state,
    "keep_alive_s": _seconds,
    "labels": _labels,
}

KEYS = frozenset(_READERS)
"""Every key that the metadata may have."""
