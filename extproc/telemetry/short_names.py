"""Endpoint keys as short as people can still tell them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """``cluster/host:port`` -> the cluster where it has one endpoint here, the address where there is one cluster,
    else the whole key.
    """
    unique = dict.fromkeys(keys)
    clusters = Counter(_cluster(key) for key in unique)
    names = {}
    for key in unique:
        cluster = _cluster(key)
        if clusters[cluster] == 1:
            names[key] = cluster or key
        else:
            names[key] = key.partition("/")[2] if len(clusters) == 1 else key
    return names


def _cluster(key: str) -> str:
    return key.partition("/")[0]
