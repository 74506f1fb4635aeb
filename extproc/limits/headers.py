"""OpenAI's ``x-ratelimit-*`` headers (https://platform.openai.com/docs/guides/rate-limits), and the refusal.

Of several limits the one with the least left, as a share, is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from extproc.limits.bucket import Bucket
from extproc.limits.limiter import Meter, Refusal
from extproc.routing.rejection import Rejection

_WORDS = {"global": "the gateway", "client": "this client address"}
_UNITS = {"requests": "requests per minute", "tokens": "tokens per minute", "day": "tokens per day"}


def rate_headers(meters: Iterable[Meter], now: float) -> tuple[tuple[str, str], ...]:
    """Headers for requests and tokens; nothing for what is not limited."""
    out: list[tuple[str, str]] = []
    for kind in ("requests", "tokens"):
        tightest: Bucket | None = None
        said = 0.0
        for meter in meters:
            bucket = meter.requests if kind == "requests" else meter.tokens
            limit = meter.limit.rpm if kind == "requests" else meter.limit.tpm
            if bucket is None or limit is None:
                continue
            share = bucket.left(now) / bucket.capacity
            if tightest is None or share < tightest.left(now) / tightest.capacity:
                tightest, said = bucket, limit
        if tightest is not None:
            out += shown(kind, said, tightest.left(now), tightest.full_s(now))
    return tuple(out)


def shown(kind: str, limit: float, left: float, full_s: float) -> tuple[tuple[str, str], ...]:
    """The three headers of one kind (``requests`` or ``tokens``)."""
    return (
        (f"x-ratelimit-limit-{kind}", f"{limit:.0f}"),
        (f"x-ratelimit-remaining-{kind}", str(max(math.floor(left + 1e-6), 0))),
        (f"x-ratelimit-reset-{kind}", _duration(full_s)),
    )


def refused(refusal: Refusal, headers: tuple[tuple[str, str], ...] = ()) -> Rejection:
    """429 that says which limit, and when to come back."""
    kind, name = refusal.key
    # Names of models and addresses come from clients; which tenant it is the client knows.
    whose = _WORDS.get(kind) or f"{kind.replace('_', ' and ')} `{name[:200]}`"
    message = (
        f"Rate limit of {whose} reached: {refusal.limit:.0f} {_UNITS[refusal.kind]}. "
        f"Try again in {math.ceil(refusal.retry_after_s)} s."
    )
    return Rejection(
        429,
        "rate_limit_error",
        "rate_limit_exceeded",
        message,
        f"limit_{kind}_{refusal.kind}",
        retry_after_s=refusal.retry_after_s,
        headers=headers,
    )


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``1s``, ``6m0s``, ``250ms``."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
