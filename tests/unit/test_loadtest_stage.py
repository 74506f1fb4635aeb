"""The Envoy configurations that are compared differ in what they should, and in nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from loadtest.stage import bare_config, extproc_config, shipped, trivial_config

SOCKET = Path("/tmp/x/extproc.sock")


def test_bare_has_no_trace_of_extproc() -> None:
    config = bare_config(shipped(), 1001, 1002, 1003)
    words = json.dumps(config)
    assert "ext_proc.v3" not in words
    assert "access_loggers.http_grpc" not in words
    assert [cluster["name"] for cluster in config["static_resources"]["clusters"]] == ["engine"]


def test_trivial_keeps_the_filter_and_the_log_and_talks_to_its_own_processor() -> None:
    config = trivial_config(shipped(), 1001, 1002, 1003, SOCKET)
    words = json.dumps(config)
    assert "ext_proc.v3" in words
    assert "access_loggers.http_grpc" in words
    assert str(SOCKET) in words
    assert "dynamic_resources" not in config


def test_extproc_changes_addresses_only() -> None:
    before, after = shipped(), extproc_config(shipped(), 1001, 1002, SOCKET)
    for config in (before, after):
        config.pop("overload_manager", None)
        config.pop("admin")
        config["static_resources"]["listeners"][0].pop("address")
        for cluster in config["static_resources"]["clusters"]:
            cluster.pop("load_assignment")
    assert before == after
