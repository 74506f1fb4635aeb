"""A rejection as the JSON body and headers the client's SDK expects.

Shapes: OpenAI https://platform.openai.com/docs/guides/error-codes, Anthropic
https://docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

import json
import math

from extproc.api.request import Dialect
from extproc.routing.rejection import Rejection

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def render(rejection: Rejection, dialect: Dialect) -> tuple[bytes, list[tuple[str, str]]]:
    """Body and headers of the reply; the status is ``rejection.status``.

    ``retry-after`` is in whole seconds, rounded up: a client that obeys must not come too early.
    """
    if dialect is Dialect.ANTHROPIC:
        kind = anthropic_type(rejection.status)
        shape: dict[str, object] = {"type": "error", "error": {"type": kind, "message": rejection.message}}
    else:
        shape = {
            "error": {
                "message": rejection.message,
                "type": rejection.type,
                "param": rejection.param,
                "code": rejection.code,
            }
        }
    headers = [("content-type", "application/json")]
    if rejection.retry_after_s is not None:
        headers.append(("retry-after", str(max(0, math.ceil(rejection.retry_after_s)))))
    headers.extend(rejection.headers)
    return json.dumps(shape).encode("ascii"), headers


def anthropic_type(status: int) -> str:
    """Anthropic's error type for an HTTP status."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
