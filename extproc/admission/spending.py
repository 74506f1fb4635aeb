"""What a request that ended has spent."""

from __future__ import annotations

from extproc.ledger import Settlement
from extproc.limits.tally import ReplySizes, used_tokens
from extproc.outcome import Outcome


def spent(settlement: Settlement, sizes: ReplySizes) -> float | None:
    """Tokens of a request that ended; None when nothing of an answer came. ``sizes`` learns from usage, and says what
    the bytes of answers without usage mean."""
    lease, end = settlement.lease, settlement.end
    succeeded = settlement.outcome is Outcome.SUCCESS
    if end is None or end.status >= 400 or not (succeeded or end.response_bytes > 0):
        return None
    by_bytes = None
    if lease.api.generates:
        if succeeded and end.usage is not None and end.usage.output:
            sizes.observe(lease.model, lease.stream, end.response_bytes, end.usage.output)
        by_bytes = sizes.tokens(lease.model, lease.stream, end.response_bytes)
    return used_tokens(
        end.usage,
        prompt_tokens=lease.prompt_tokens,
        output_tokens=lease.output_tokens,
        reply_tokens=by_bytes,
    )
