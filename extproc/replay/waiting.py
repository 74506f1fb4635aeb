"""What lets requests wait before the engines in a replay, as words: ``interactive:max_wait_s=20:max_ttft_s=1``.

The name is one of the presets of ``admission`` in a configuration, the options are the numbers of
:class:`extproc.admission.policy.Policy`. A request that is refused has failed; one that waits has its TTFT from its
arrival at the gateway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from extproc.admission.policy import PRESETS, Policy
from extproc.replay.errors import ReplayError

_NUMBERS = (
    "max_wait_s",
    "max_ttft_s",
    "max_kv_usage",
    "max_requests",
    "max_bytes",
    "min_share",
    "headroom",
    "aging_s",
    "error_rate",
)


def parse_admission(words: str) -> Policy:
    """Read ``PRESET[:key=value…]``.

    Raises:
        ReplayError: no such preset or option, or a value that is no number.
    """
    name, *pairs = words.split(":")
    if name not in PRESETS:
        raise ReplayError(f"no admission preset is called {name!r}; there are {', '.join(PRESETS)}")
    numbers: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in _NUMBERS:
            raise ReplayError(f"admission {words!r}: {key!r} is not one of {', '.join(_NUMBERS)}")
        try:
            number = float(value)
        except ValueError:
            raise ReplayError(f"admission {words!r}: {key} must be a number, not {value!r}") from None
        if not number >= 0:
            raise ReplayError(f"admission {words!r}: {key} must not be negative")
        numbers[key] = number
    return replace(PRESETS[name], **numbers)
