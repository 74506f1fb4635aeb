"""What a simulated engine reports. ``at`` is virtual seconds; events of one ``advance`` are in order of
time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Started:
    """A job left the waiting queue: its blocks are reserved and its prefill begins (again, after a
    preemption).
    """

    id: str
    at: float
    cached_tokens: int


@dataclass(slots=True, frozen=True)
class FirstToken:
    """The prefill is done and the first output token is there."""

    id: str
    at: float
    since_arrival_s: float


@dataclass(slots=True, frozen=True)
class Finished:
    """All output tokens are there; the blocks are free for others and stay cached until evicted."""

    id: str
    at: float
    since_arrival_s: float
    output_tokens: int


@dataclass(slots=True, frozen=True)
class Aborted:
    """A cancelled job has left the engine, at the end of the step it was in."""

    id: str
    at: float
    output_tokens: int


@dataclass(slots=True, frozen=True)
class Preempted:
    """A running job lost its blocks to older ones; it waits at the front and will be recomputed."""

    id: str
    at: float


@dataclass(slots=True, frozen=True)
class Rejected:
    """A job that could never run here."""

    id: str
    at: float
    reason: str


@dataclass(slots=True, frozen=True)
class BlocksStored:
    """Blocks ``first_block``… of job ``id`` entered the prefix cache."""

    at: float
    id: str
    first_block: int
    hashes: tuple[int, ...]
    parent: int | None
    """Hash of the block before them; None at the start of a prompt."""


@dataclass(slots=True, frozen=True)
class BlocksRemoved:
    """Blocks were evicted."""

    at: float
    hashes: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Cleared:
    """The whole prefix cache was dropped."""

    at: float


KvEvent = BlocksStored | BlocksRemoved | Cleared
Event = Started | FirstToken | Finished | Aborted | Preempted | Rejected | KvEvent
