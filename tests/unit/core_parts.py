"""Small builders for tests of the core."""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.api.request import Api, InferenceRequest, Prompt, RequestHead
from extproc.core import Core
from extproc.fleet.endpoint import EndpointSpec
from extproc.outcome import End, Usage
from extproc.routing.match import Router
from extproc.routing.pool import Pool
from extproc.routing.route import Route


def spec(name: str, pool: str = "llama", port: int = 8000, **more: object) -> EndpointSpec:
    return EndpointSpec(name, f"10.0.0.1:{port}", pool, models=("llama-3",), **more)  # type: ignore[arg-type]


def request(
    request_id: str,
    text: str = "hello",
    *,
    model: str | None = "llama-3",
    session: str | None = None,
    headers: dict[str, str] | None = None,
    stream: bool = True,
) -> InferenceRequest:
    head = RequestHead(request_id, "POST", "/v1/chat/completions", "", headers or {})
    pieces = (b"\xffuser", text.encode())
    prompt = Prompt(pieces, size=sum(map(len, pieces)))
    return InferenceRequest(head, Api.CHAT, model=model, stream=stream, prompt=prompt, session=session)


def core(
    specs: Sequence[EndpointSpec],
    *,
    routes: Sequence[Route] = (),
    strategy: str = "least-requests",
    fallbacks: int = 1,
    **more: object,
) -> Core:
    built = Core(rng=random.Random(1), **more)  # type: ignore[arg-type]
    names = dict.fromkeys(s.pool for s in specs)
    pools = {
        name: Pool(
            name, models=("llama-3",) if name == "llama" else (name,), strategy=strategy, fallbacks=fallbacks
        )
        for name in names
    }
    built.install(Router(pools, routes), specs)
    return built


def end(request_id: str, endpoint: EndpointSpec, status: int = 200, **more: object) -> End:
    defaults: dict[str, object] = {
        "ttft_s": 0.1,
        "engine_s": 1.0,
        "duration_s": 1.0,
        "usage": Usage(10, 20, 0),
    }
    return End(request_id, endpoint.cluster, endpoint.address, status, **{**defaults, **more})  # type: ignore[arg-type]
