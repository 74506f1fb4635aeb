"""An error answer in vLLM's shape."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """Ends a request with ``status`` and an OpenAI-style error body."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def model_not_found(model: str) -> ApiError:
    """The model is not served here."""
    return ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
