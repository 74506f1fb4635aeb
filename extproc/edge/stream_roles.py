"""One ext_proc service, several filters of Envoy that call it: which of our servicers a stream belongs to.

A filter says what it is in the initial metadata of its gRPC service (``x-extproc-role``), which no client can write. A
stream without a role is a request to be decided.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc

ROLE = "x-extproc-role"
GUARD_ROLE = "guard"
SHADOW_ROLE = "shadow"


class StreamRoles(ep_grpc.ExternalProcessorServicer):
    """Hands each stream to the servicer of its role; an unknown role is as none."""

    def __init__(
        self,
        requests: ep_grpc.ExternalProcessorServicer,
        roles: Mapping[str, ep_grpc.ExternalProcessorServicer],
    ) -> None:
        self._requests = requests
        self._roles = roles

    async def Process(  # noqa: N802 - name given by the service
        self,
        requests: object,
        context: grpc.aio.ServicerContext[ep.ProcessingRequest, ep.ProcessingResponse],
    ) -> None:
        """One stream."""
        servicer = self._requests
        for key, value in context.invocation_metadata() or ():
            if key == ROLE:
                servicer = self._roles.get(str(value), servicer)
        await servicer.Process(requests, context)
