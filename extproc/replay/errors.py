"""What a user of replay did wrong, in words."""

from __future__ import annotations


class ReplayError(Exception):
    """A trace, policy, preset or fault that cannot be used. The message says where and why."""
