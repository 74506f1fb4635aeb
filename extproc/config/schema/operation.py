"""How extproc works, watches and reports: the sections about the machinery."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.schema.base import Duration, FilePath, Section, Size, wrong
from extproc.fleet.health import HealthPolicy

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

    brown_out_lag: Annotated[Duration, Field(gt=0)] = 0.1
    """When the event loop is later than this, prompts are left unread until it has caught up: requests are routed
    by model and load alone."""

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
    """Keeping away from endpoints that fail (docs/health.md). The last endpoint of a pool is never left out."""

    failures: Annotated[int, Field(ge=1)] = 3
    """Failed attempts or refused scrapes in a row that open an endpoint's circuit."""
    backoff: Annotated[Duration, Field(ge=0.05)] = 1.0
    """How long it stays open the first time; it doubles with each further one."""
    max_backoff: Annotated[Duration, Field(ge=0.05)] = 60.0
    """Longest such time."""
    error_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of failures among the outcomes of `window` above which the circuit opens for `open`; 1: never."""
    window: Annotated[Duration, Field(ge=1)] = 120.0
    """Time over which failures are counted for `error_rate`."""
    min_samples: Annotated[int, Field(ge=1)] = 20
    """Fewer outcomes in `window` open nothing."""
    open: Annotated[Duration, Field(ge=0.05)] = 180.0
    """How long it stays open for its error rate the first time; it doubles with each further one."""
    max_open: Annotated[Duration, Field(ge=0.05)] = 1800.0
    """Longest such time."""
    silence: Annotated[Duration, Field(ge=0.5)] = 5.0
    """An engine whose scrapes time out and that answers no request for so long is taken to be stuck."""
    probation: Annotated[int, Field(ge=0, le=16)] = 3
    """Successes, of 1, then 2, then 4 requests at once, before a returning endpoint is trusted again."""
    busy_backoff: Annotated[Duration, Field(ge=0.01)] = 0.5
    """Rest of an endpoint that said twice in a row that it is busy (503, 429); it doubles while it goes on."""
    max_busy_backoff: Annotated[Duration, Field(ge=0.01)] = 5.0
    """Longest such rest."""
    max_ejection: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a pool that may be left out at once for errors, busy answers or on trial. Endpoints that do not
    answer at all are left out however many they are."""
    queue_limit: Annotated[float, Field(gt=0)] = 0.9
    """Requests waiting in an engine, as a share of its `max_concurrency`, above which others are preferred."""
    probe_interval: Annotated[Duration, Field(ge=0.05)] = 1.0
    """Time between two questions to the health page of an endpoint that is warming up."""
    probe_timeout: Annotated[Duration, Field(ge=0.05)] = 2.0
    """A probe that takes longer has failed."""
    warm_up_timeout: Annotated[Duration, Field(ge=0.1)] = 60.0
    """Longest time for one warm-up prompt of a pool; the endpoint then takes requests without it."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        for first, most in (
            ("backoff", "max_backoff"),
            ("open", "max_open"),
            ("busy_backoff", "max_busy_backoff"),
        ):
            if getattr(self, most) < getattr(self, first):
                raise wrong(f"`{most}` is shorter than `{first}`; make it at least as long")
        return self

    @property
    def policy(self) -> HealthPolicy:
        """The bounds as the core wants them."""
        return HealthPolicy(
            failures=self.failures,
            backoff_s=self.backoff,
            max_backoff_s=self.max_backoff,
            error_share=self.error_rate,
            window_s=self.window,
            min_samples=self.min_samples,
            open_s=self.open,
            max_open_s=self.max_open,
            silence_s=self.silence,
            probation=self.probation,
            busy_backoff_s=self.busy_backoff,
            max_busy_backoff_s=self.max_busy_backoff,
            queue_share=self.queue_limit,
            max_ejection=self.max_ejection,
        )


class Retries(Section):
    """Sending a request again when an engine could not take it. Only what no engine has begun to work on is."""

    budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Retries of busy answers (503) as a share of a pool's requests. Connections that cannot be made are not counted:
    their retries cost no engine anything."""
    burst: Annotated[int, Field(ge=0, le=10_000)] = 10
    """Retries that a pool may save up, and has at the start."""


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
    block_bytes: Annotated[Size, Field(ge=16, le=65536)] = 256
    """Prompt bytes in a block, the grain of prefix matches where the tokenizer is not known."""
