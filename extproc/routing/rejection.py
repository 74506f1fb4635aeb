"""A refusal as a value: the edge renders it in the client's dialect. The table of design section 2 lives here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Rejection:
    """Why a request is not served. ``reason`` is for metrics and logs: a short word from a fixed set."""

    status: int
    type: str
    code: str
    message: str
    reason: str
    retry_after_s: float | None = None
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=())


def bad_request(message: str, *, param: str | None = None, reason: str = "bad_request") -> Rejection:
    """400: nothing can be routed from this request."""
    return Rejection(400, "invalid_request_error", "invalid_request_error", message, reason, param=param)


def model_not_found(model: str, known: list[str]) -> Rejection:
    """404 with the models that exist here (at most eight are named)."""
    listed = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
    message = f"The model `{model[:200]}` does not exist here."
    message += f" Models here: {listed}." if known else " No models are configured."
    return Rejection(
        404, "invalid_request_error", "model_not_found", message, "model_not_found", param="model"
    )


def no_capacity(pool: str, why: str, *, retry_after_s: float = 1.0) -> Rejection:
    """503: no endpoint of the pool exists or may be used."""
    message = f"No endpoint of pool `{pool}` can take requests: {why}."
    return Rejection(503, "server_error", "no_capacity", message, "no_capacity", retry_after_s=retry_after_s)


def internal(message: str = "The gateway could not decide where to send this request.") -> Rejection:
    """500: a fault of ours, said at once instead of a hang."""
    return Rejection(500, "server_error", "internal_error", message, "internal_error")
