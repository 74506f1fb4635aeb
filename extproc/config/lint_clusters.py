"""Lint of an Envoy bootstrap: the cluster that stands for extproc, and what Envoy and extproc share."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import PurePath

from extproc.config.address import Address, is_loopback, parse_address
from extproc.config.node import Node
from extproc.config.problem import Problem
from extproc.config.schema import Settings


def lint_extproc_cluster(
    root: Node, name: str, settings: Settings, published: Collection[str]
) -> Iterator[Problem]:
    """Whether the cluster that stands for extproc reaches us, with all requests."""
    clusters = root.at("static_resources", "clusters")
    cluster = next((item for item in clusters.items() if item.at("name").text == name), None)
    if cluster is None:
        if name not in published:
            yield clusters.problem(
                f"the ext_proc filter names cluster `{name}`, which does not exist; add it"
            )
        return
    options = cluster.at("typed_extension_protocol_options")
    if not cluster.at("http2_protocol_options") and not any(
        found.at("explicit_http_config", "http2_protocol_options").value is not None
        for found in options.typed(".HttpProtocolOptions")
    ):
        yield options.problem(
            f"cluster `{name}` does not speak HTTP/2, which gRPC needs; write "
            "`explicit_http_config: {http2_protocol_options: {}}`"
        )
    breakers = cluster.at("circuit_breakers", "thresholds")
    limits = [
        item.at("max_requests") for item in breakers.items() if item.at("priority").text in ("", "DEFAULT")
    ]
    limit = limits[0] if limits else cluster.at("circuit_breakers")
    most = limit.number if limit.number is not None else 1024
    if most < settings.limits.max_streams:
        yield limit.problem(
            f"at most {most:g} requests at once reach extproc, further ones get an error, but "
            "`limits.max_streams` is "
            f"{settings.limits.max_streams}; write `max_requests: 100000` (and the same for "
            "max_connections and "
            "max_pending_requests)"
        )
    yield from _extproc_address(cluster, parse_address(settings.listen.grpc))


def _extproc_address(cluster: Node, listen: Address) -> Iterator[Problem]:
    """Envoy's relative socket paths are meant from its working directory, which is not known here: their end
    must fit. Host names are not resolved: only what certainly differs is reported."""
    for group in cluster.at("load_assignment", "endpoints").items():
        for endpoint in group.at("lb_endpoints").items():
            pipe = endpoint.at("endpoint", "address", "pipe", "path")
            host = endpoint.at("endpoint", "address", "socket_address", "address")
            port = endpoint.at("endpoint", "address", "socket_address", "port_value")
            if pipe:
                if not listen.path or not same_path(pipe.text, listen.path):
                    yield pipe.problem(
                        f"Envoy looks for extproc at `{pipe.text}`, but `listen.grpc` is `{listen}`; make "
                        "them the same"
                    )
            elif port and (listen.path or port.number != listen.port):
                yield port.problem(
                    f"Envoy looks for extproc at `{host.text}:{port.text}`, but `listen.grpc` is `{listen}`; "
                    "make them the same"
                )
            elif host and is_loopback(listen.host) and not is_loopback(host.text):
                yield host.problem(
                    f"Envoy looks for extproc at `{host.text}`, but `listen.grpc` is `{listen}`, which "
                    "only this machine "
                    "reaches; listen on an address that Envoy reaches",
                    fatal=False,
                )


def lint_files(root: Node, settings: Settings) -> Iterator[Problem]:
    """Whether Envoy reads what we write, and is asked where it listens."""
    path = root.at("dynamic_resources", "cds_config", "path_config_source", "path")
    live = settings.envoy.live
    if path and not same_path(str(PurePath(path.text).parent), str(live)):
        yield path.problem(
            f"Envoy reads its clusters from `{path.text}`, but extproc writes them into `{live}` "
            "(`envoy.live`); make "
            "them the same folder",
            fatal=False,
        )
    if settings.envoy.admin is not None:
        yield from _admin(root.at("admin", "address"), parse_address(settings.envoy.admin))


def _admin(address: Node, asked: Address) -> Iterator[Problem]:
    pipe = address.at("pipe", "path")
    port = address.at("socket_address", "port_value")
    if pipe:
        here, fits = f"at `{pipe.text}`", bool(asked.path) and same_path(pipe.text, asked.path)
    elif port:
        here, fits = f"at port {port.text}", not asked.path and port.number == asked.port
    else:
        here, fits = "nowhere (it has no `admin`)", False
    if not fits:
        yield (pipe or port or address).problem(
            f"extproc asks Envoy's admin at `{asked}` (`envoy.admin`) whether new clusters have arrived, "
            "but Envoy "
            f"listens {here}; make them the same, or write `envoy: {{admin: null}}`",
            fatal=False,
        )


def same_path(envoys: str, ours: str) -> bool:
    """Whether Envoy's path can be ours: equal, or the end of ours where it is relative."""
    theirs, own = PurePath(envoys).parts, PurePath(ours).parts
    if PurePath(envoys).is_absolute() and PurePath(ours).is_absolute():
        return theirs == own
    return own[-len(theirs) :] == theirs if len(theirs) <= len(own) else theirs[-len(own) :] == own
