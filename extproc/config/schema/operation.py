"""How extproc works, watches and reports: the sections about the machinery."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.schema.base import Duration, FilePath, Section, Size, wrong

Positive = Field(gt=0)


class Limits(Section):
    """Bounds on what extproc holds at once."""

    max_body_bytes: Annotated[Size, Positive] = 64 * 2**20
    """Largest request body. Envoy's buffer limits must be at least as large, and do the refusing (413)."""
    max_message_bytes: Annotated[Size, Positive] | None = None
    """Largest gRPC message from Envoy; `null`: `max_body_bytes` and 1 MiB for headers."""
    max_streams: Annotated[int, Field(ge=1)] = 20_000
    """Requests being decided or waiting at once; more are refused with 429."""
    max_buffered_bytes: Annotated[Size, Positive] = 1024 * 2**20
    """Bytes of request bodies held at once; more are refused with 429."""

    @property
    def message_bytes(self) -> int:
        """``max_message_bytes``, or its default."""
        return self.max_message_bytes or self.max_body_bytes + 2**20


class Scrape(Section):
    """Reading the engines' /metrics."""

    interval: Annotated[Duration, Field(ge=0.1)] = 1.0
    """Time between two scrapes of one endpoint."""
    timeout: Annotated[Duration, Field(ge=0.05)] = 2.0
    """A scrape that takes longer has failed."""
    max_bytes: Annotated[Size, Positive] = 4 * 2**20
    """A longer reply has failed."""


class Health(Section):
    """Keeping away from endpoints that fail. The last endpoint of a pool is never excluded."""

    failures: Annotated[int, Field(ge=1)] = 3
    """Failed attempts or scrapes in a row that exclude an endpoint."""
    backoff: Annotated[Duration, Field(ge=0.05)] = 1.0
    """Time of the first exclusion; it doubles with each further one."""
    max_backoff: Annotated[Duration, Field(ge=0.05)] = 60.0
    """Longest exclusion."""
    probation: Annotated[int, Field(ge=0)] = 3
    """Successes, one request at a time, before a returning endpoint is trusted again."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.max_backoff < self.backoff:
            raise wrong("`max_backoff` is shorter than `backoff`; make it at least as long")
        return self


class Removal(Section):
    """Taking endpoints out of `clusters.yaml` while they serve."""

    drain_deadline: Duration = 600.0
    """Longest wait for running requests before the cluster is taken from Envoy."""
    allow_big_removals: bool = False
    """Explicit word that one edit may remove more than half of a pool."""


class Responses(Section):
    """What clients are told."""

    headers: bool = False
    """Add `x-gateway-endpoint`, `x-gateway-pool` and `x-gateway-request-id` to responses."""


class Logging(Section):
    """extproc's own log, on standard error. Prompt text and keys are never logged."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    format: Literal["json", "text"] = "text"
    """`json` for log collectors, `text` for people."""
    requests: bool = False
    """A line for every request that ended: endpoint, status, times, tokens."""


class Decisions(Section):
    """Records of why a request went where it went. They hold hashes and lengths, no prompt text."""

    ring: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """Records kept in memory for `extproc explain`."""
    log: FilePath | None = None
    """File for all records, one JSON object a line; `null`: none."""
    log_max_bytes: Annotated[Size, Positive] = 100 * 2**20
    """Size at which the log file is rotated."""
    log_files: Annotated[int, Field(ge=1, le=1000)] = 5
    """Log files kept, the current one included."""


class Index(Section):
    """What extproc remembers of the engines' prefix caches."""

    max_blocks: Annotated[int, Field(ge=1000)] = 2_000_000
    """Blocks remembered over all endpoints; the oldest are forgotten first."""
    block_bytes: Annotated[Size, Field(ge=16, le=65536)] = 512
    """Prompt bytes in a block, the grain of prefix matches where the tokenizer is not known."""
