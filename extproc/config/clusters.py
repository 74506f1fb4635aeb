"""``clusters.yaml``: Envoy clusters in, endpoints for us and completed clusters for Envoy out.

Rules of this file:

- a cluster is ours when its ``metadata.filter_metadata.extproc`` (or that of one of its endpoints) names a
  pool; others go to Envoy as they are;
- the list may stand under ``resources:`` (a DiscoveryResponse), ``clusters:``, or
  ``static_resources.clusters`` (a bootstrap: Envoy has these already, so they are not published and
  cannot be completed);
- STATIC and EDS endpoints have IP addresses. A DNS name of a STRICT_DNS cluster stands for as many endpoints
  as it has addresses; whoever resolves it gives them to :meth:`Clusters.expand`. LOGICAL_DNS stands for one;
- ``listed`` endpoints are those Envoy must be told by ``ip:port``: every endpoint with a known address of a
  cluster that has the ``override_host`` policy. Clusters of ours with several endpoints get it, and all
  STRICT_DNS ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from extproc.config.cluster_defaults import HTTP_OPTIONS, complete
from extproc.config.cluster_metadata import ClusterSettings, read_settings
from extproc.config.cluster_places import Places, host_port, is_ip, locate
from extproc.config.cluster_tls import UpstreamTls, upstream_tls
from extproc.config.envoy_message import field, parse
from extproc.config.node import Node
from extproc.config.problem import ConfigError, Problem
from extproc.config.yaml_source import Document, NodePath, read_file
from extproc.fleet.endpoint import EndpointSpec

MAX_ADDRESSES = 1024
"""Endpoints that one DNS name may stand for."""
_LOGICAL = "LOGICAL_DNS"
_DNS = ("STRICT_DNS", _LOGICAL)


@dataclass(slots=True, frozen=True)
class DnsName:
    """A name that must be resolved. ``spec`` is the endpoint as long as no address is known."""

    host: str
    port: int
    spec: EndpointSpec
    many: bool
    """Every address is an endpoint (STRICT_DNS); False: one endpoint, whatever its address."""
    family: str = "V4_PREFERRED"
    """Envoy's ``dns_lookup_family``: both must look at the same addresses."""


@dataclass(slots=True, frozen=True)
class Clusters:
    """One reading of the file. Immutable."""

    fixed: tuple[EndpointSpec, ...]
    """Endpoints whose addresses are written in the file."""
    dns: tuple[DnsName, ...]
    names: Mapping[str, int]
    """Every cluster -> its line."""
    resources: tuple[dict[str, Any], ...]
    """All clusters, completed, to publish; empty for a bootstrap's static clusters."""
    warnings: tuple[Problem, ...] = ()
    files: tuple[Path, ...] = ()
    """EDS files that were read: changes of theirs are changes of this."""
    tls: Mapping[str, UpstreamTls] = dataclass_field(default_factory=dict)
    """Clusters that are reached by TLS."""

    @property
    def endpoints(self) -> tuple[EndpointSpec, ...]:
        """All endpoints, DNS names unresolved."""
        return self.expand({})

    def expand(self, addresses: Mapping[tuple[str, int], tuple[str, ...]]) -> tuple[EndpointSpec, ...]:
        """All endpoints. ``addresses``: (host, port) -> IPs; a name without any is one unlisted endpoint."""
        found = list(self.fixed)
        for name in self.dns:
            ips = addresses.get((name.host, name.port), ())[:MAX_ADDRESSES] if name.many else ()
            if not ips:
                found.append(name.spec)
            for ip in ips:
                found.append(replace(name.spec, address=host_port(ip, name.port), listed=True))
        unique = {spec.key: spec for spec in found}
        return tuple(unique.values())


def read_clusters(document: Document, base: Path | None = None) -> Clusters:
    """Read the clusters of a parsed file. ``base``: where relative EDS paths start (default: its directory).

    Raises:
        ConfigError: with every problem found, at its line.
    """
    path, items, published = locate(document)
    reading = _Reading(document, base or Path(document.file).parent, published)
    for index, item in enumerate(items):
        reading.cluster(item, (*path, index))
    if any(problem.fatal for problem in reading.problems):
        raise ConfigError(reading.problems)
    return Clusters(
        fixed=tuple(reading.endpoints),
        dns=tuple(reading.dns),
        names=reading.names,
        resources=tuple(reading.resources) if published else (),
        warnings=tuple(reading.problems),
        files=tuple(reading.files),
        tls=reading.tls,
    )


class _Reading:
    """Collects what one pass over the file finds."""

    def __init__(self, document: Document, base: Path, published: bool) -> None:
        self.document = document
        self.base = base
        self.published = published
        self.problems: list[Problem] = []
        self.names: dict[str, int] = {}
        self.endpoints: list[EndpointSpec] = []
        self.dns: list[DnsName] = []
        self.resources: list[dict[str, Any]] = []
        self.files: list[Path] = []
        self.tls: dict[str, UpstreamTls] = {}

    def report(self, path: NodePath, message: str, *, fatal: bool = True) -> None:
        self.problems.append(self.document.problem(path, message, fatal=fatal))

    def cluster(self, item: object, path: NodePath) -> None:
        """One cluster of the list."""
        from envoy.config.cluster.v3 import cluster_pb2

        if not isinstance(item, dict):
            self.report(path, "a cluster must be keys with values, beginning with `name:`")
            return
        item = dict(item)
        kind = item.pop("@type", None)
        if kind is not None and not str(kind).endswith("envoy.config.cluster.v3.Cluster"):
            self.report((*path, "@type"), f"only clusters belong here, not `{kind}`")
            return
        message = cluster_pb2.Cluster()
        found = parse(self.document, path, item, message)
        self.problems += found
        if any(problem.fatal for problem in found):
            return
        name = message.name
        if not name:
            self.report(path, "a cluster needs a `name`")
            return
        if name in self.names:
            self.report(
                (*path, "name"), f"cluster `{name}` is already on line {self.names[name]}; rename one"
            )
            return
        tls = upstream_tls(message)
        if tls is not None:
            self.tls[name] = tls
        self.names[name] = self.document.line(path)
        self.resources.append(self._ours(item, message, path) or {"@type": _TYPE, **item})

    def _ours(self, item: dict[str, Any], message: Any, path: NodePath) -> dict[str, Any] | None:
        """Read the endpoints; the completed cluster, or None when it is not ours."""
        before = len(self.problems)
        settings, given = read_settings(self.document, item, path, ClusterSettings(), self.problems)
        places = Places(self.document, path, item, message.load_assignment)
        eds = message.type == message.EDS and not message.HasField("cluster_type")
        if eds:
            eds_places = self._eds(message, path)
            if eds_places is None:
                return None
            places = eds_places
        found = self._specs(places, settings, message)
        if not any(spec.pool for spec, _, _ in found) and not settings.pool:
            if given:
                self.report(
                    path,
                    f"cluster `{message.name}` has extproc metadata but no `pool`, so it gets no requests; "
                    "write `pool: NAME`",
                    fatal=False,
                )
            return None
        for spec, _, where in found:
            if not spec.pool:
                self.report(
                    where, "this endpoint has no `pool`; write it in the cluster's metadata", fatal=False
                )
        found = [entry for entry in found if entry[0].pool]
        own_policy = any(field(item, name)[1] is not None for name in ("load_balancing_policy", "lb_policy"))
        kind = message.DiscoveryType.Name(message.type)
        wanted = len(found) > 1 or eds or kind == "STRICT_DNS"
        lists = _has_override_host(message) or (
            wanted and not own_policy and self.published and kind != _LOGICAL
        )
        if len(found) > 1 and not lists:
            self.report(
                path,
                f"cluster `{message.name}` has several endpoints but no override_host policy that can "
                "be told which one to use; remove its own policy, or write that one (docs/envoy.md)",
            )
        self._place(found, lists, kind, message)
        self._check_idle_timeout(item, settings, path)
        if len(self.problems) > before and any(problem.fatal for problem in self.problems[before:]):
            return None
        add = lists and not _has_override_host(message)
        return complete(item, list_hosts=add, keep_alive_s=settings.keep_alive_s)

    def _place(self, found: list[Any], lists: bool, kind: str, message: Any) -> None:
        for spec, address, where in found:
            host, port = address
            if is_ip(host):
                self.endpoints.append(replace(spec, listed=lists))
            elif kind in _DNS:
                family = message.DnsLookupFamily.Name(message.dns_lookup_family)
                name = DnsName(host, port, spec, lists and kind == "STRICT_DNS")
                self.dns.append(name if family == "AUTO" else replace(name, family=family))
            else:
                self.report(
                    where, f"`{host}` is a name, and this cluster's type takes IPs; write `type: STRICT_DNS`"
                )

    def _specs(self, places: Places, settings: ClusterSettings, message: Any) -> list[Any]:
        """``(spec, (host, port), path)`` of every endpoint."""
        found = []
        tls = message.transport_socket.name == "envoy.transport_sockets.tls" or "UpstreamTlsContext" in (
            message.transport_socket.typed_config.type_url
        )
        for locality, endpoint, data, path in places.endpoints():
            own, given = read_settings(places.document, data, path, settings, self.problems)
            if not (settings.pool or given):
                continue
            socket = endpoint.endpoint.address.socket_address
            if not socket.address or not socket.port_value:
                self.problems.append(
                    places.document.problem(
                        path,
                        "an engine needs `endpoint.address.socket_address` with `address` and `port_value`",
                    )
                )
                continue
            spec = own.spec(message.name, host_port(socket.address, socket.port_value), tls, locality)
            found.append((spec, (socket.address, socket.port_value), path))
        return found

    def _eds(self, message: Any, path: NodePath) -> Places | None:
        """Read the file that an EDS cluster names."""
        from envoy.config.endpoint.v3 import endpoint_pb2

        source = message.eds_cluster_config.eds_config
        text = source.path_config_source.path or source.path
        if not text:
            self.report(
                path,
                f"the endpoints of `{message.name}` come from a management server that extproc cannot ask; "
                "use a `path_config_source`, or STRICT_DNS",
                fatal=False,
            )
            return None
        file = self.base / text
        self.files.append(file)
        try:
            document = read_file(file)
        except ConfigError as error:
            self.problems += error.problems
            return None
        wanted = message.eds_cluster_config.service_name or message.name
        resources = document.data.get("resources")
        for index, item in enumerate(resources if isinstance(resources, list) else []):
            place = ("resources", index)
            if not isinstance(item, dict) or field(item, "cluster_name")[1] != wanted:
                continue
            item = {key: value for key, value in item.items() if key != "@type"}
            assignment = endpoint_pb2.ClusterLoadAssignment()
            self.problems += parse(document, place, item, assignment)
            return Places(document, place, {"load_assignment": item}, assignment, skip=1)
        self.report(path, f"{file} has no endpoints for `{wanted}`; add a resource with that `cluster_name`")
        return None

    def _check_idle_timeout(self, item: dict[str, Any], settings: ClusterSettings, path: NodePath) -> None:
        """An idle timeout above the engine's keep-alive loses requests."""
        newer = Node(self.document, path, item).at("typed_extension_protocol_options", HTTP_OPTIONS)
        older = Node(self.document, path, item).at("common_http_protocol_options")
        if newer and older:
            self.problems.append(
                older.problem(
                    f"Envoy does not read this beside `{HTTP_OPTIONS}`; move it into that", fatal=False
                )
            )
        common = newer.at("common_http_protocol_options") if newer or not older else older
        timeout = common.at("idle_timeout")
        where, value = timeout.path, timeout.value
        if value is None:
            if not self.published:
                self.report(
                    path,
                    f"no idle_timeout for `{item.get('name')}`: Envoy's is an hour, and the engine closes "
                    f"idle connections after {settings.keep_alive_s:g} s; write "
                    f"common_http_protocol_options: {{idle_timeout: {settings.keep_alive_s * 0.6:g}s}}",
                )
            return
        seconds = float(str(value).rstrip("s"))
        if seconds == 0 or seconds >= settings.keep_alive_s:
            self.report(
                where,
                f"idle_timeout {value} is not below the engine's keep-alive ({settings.keep_alive_s:g} s): "
                f"requests would be lost; write {settings.keep_alive_s * 0.6:g}s, or `keep_alive_s` in the "
                "extproc metadata if the engine keeps connections longer",
            )


_TYPE = "type.googleapis.com/envoy.config.cluster.v3.Cluster"


def _has_override_host(message: Any) -> bool:
    return any(
        policy.typed_extension_config.typed_config.type_url.endswith(".OverrideHost")
        for policy in message.load_balancing_policy.policies
    )
