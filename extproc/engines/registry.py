"""All engines by the name that ``engine:`` takes in an endpoint's metadata."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.engines.engine import Engine
from extproc.engines.llamacpp import LLAMACPP
from extproc.engines.other import OTHER
from extproc.engines.sglang import SGLANG
from extproc.engines.tgi import TGI
from extproc.engines.triton import TRITON
from extproc.engines.trtllm import TRTLLM
from extproc.engines.vllm import VLLM

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (VLLM, SGLANG, TRTLLM, TRITON, TGI, LLAMACPP, OTHER)
}


def engine_named(name: str) -> Engine:
    """The adapter of this name; an unknown name is an engine of which nothing is known."""
    return ENGINES.get(name, OTHER)
