"""Requests that the gateway answers itself: the union of the pools' models, and its own health."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from extproc.api import models
from extproc.api.paths import model_id, own_answer
from extproc.api.request import Api, Dialect, RequestHead
from extproc.edge import answers
from extproc.routing.rejection import Rejection, model_not_found
from extproc.routing.tenant import Tenant

_JSON = (("content-type", "application/json"),)


class OwnAnswers:
    """``names`` gives (model id, pool) as clients may use them now; ``ready`` says whether requests can be served."""

    def __init__(
        self, names: Callable[[], Sequence[tuple[str, str]]], ready: Callable[[], tuple[bool, str]]
    ) -> None:
        self._names = names
        self._ready = ready
        self._created = int(time.time())

    def reply(self, head: RequestHead, tenant: Tenant | Rejection) -> ep.ProcessingResponse | None:
        """The answer, or None for a request that an engine must answer. Health is nobody's secret; models are those that
        the tenant may use."""
        api = own_answer(head.method, head.path)
        if api is None:
            return None
        if api is Api.HEALTH:
            return self._health()
        anthropic = models.wants_anthropic(head.headers)
        if isinstance(tenant, Rejection):
            return answers.rejection(tenant, Dialect.ANTHROPIC if anthropic else Dialect.OPENAI)
        return self._models(head, tenant, anthropic=anthropic)

    def _health(self) -> ep.ProcessingResponse:
        ready, why = self._ready()
        body = b'{"status":"ok"}' if ready else f'{{"status":"unavailable","reason":"{why}"}}'.encode()
        return answers.immediate(200 if ready else 503, body, _JSON, "gateway_health")

    def _models(self, head: RequestHead, tenant: Tenant, *, anthropic: bool) -> ep.ProcessingResponse:
        names = [(name, pool) for name, pool in self._names() if tenant.sees(name)]
        wanted = model_id(head.path)
        if wanted is None:
            listing = models.anthropic_listing if anthropic else models.listing
            return answers.immediate(200, listing(names, self._created), _JSON, "gateway_models")
        owner = dict(names).get(wanted)
        if owner is None:
            known = [name for name, _ in names]
            return answers.rejection(
                model_not_found(wanted, known), Dialect.ANTHROPIC if anthropic else Dialect.OPENAI
            )
        body = (
            models.anthropic_single(wanted, self._created)
            if anthropic
            else models.single(wanted, owner, self._created)
        )
        return answers.immediate(200, body, _JSON, "gateway_models")
