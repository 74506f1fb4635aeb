"""What lets requests wait before the engines in a replay, as words: ``interactive:max_wait_s=20:max_ttft_s=1``.

The name is one of the presets of ``admission`` in a configuration, the options are the numbers of
:class:`extproc.admission.policy.Policy`. A request that is refused has failed; one that waits has its TTFT from its
arrival at the gateway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from extproc.admission.policy import PRESETS, Policy
from extproc.replay.words import name_and_numbers

_MOST = {
    "max_wait_s": 1e6,
    "max_ttft_s": 1e6,
    "max_kv_usage": 1.0,
    "max_requests": 1e9,
    "max_bytes": 1e15,
    "min_share": 1.0,
    "headroom": 1.0,
    "aging_s": 1e6,
    "error_rate": 1.0,
}


def parse_admission(words: str) -> Policy:
    """Read ``PRESET[:key=value…]``.

    Raises:
        ReplayError: no such preset or option, or a value out of range.
    """
    name, values = name_and_numbers(words, "admission", PRESETS, _MOST)
    numbers: dict[str, Any] = dict(values)
    return replace(PRESETS[name], **numbers)
