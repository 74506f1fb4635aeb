"""A job on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.simulator.job import Job


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's own record of one job."""

    job: Job
    order: int
    """Order of arrival; a preempted sequence keeps it and so waits at the front."""
    arrived: float
    generated: int = 0
    """Output tokens made; while decoding, those made before it joined the decode batch."""
    target: int = 0
    """Tokens to be in the KV cache when the prefill is done: the prompt, plus what was generated before a
    preemption.
    """
    computed: int = 0
    """Tokens in the KV cache; while decoding, those it joined the batch with."""
    cached: int = 0
    """Tokens found in the prefix cache at the first start."""
    offered: int = 0
    """Leading blocks already offered to the prefix cache."""
    names: list[int] = field(default_factory=list)
    """Named blocks it holds, in order."""
    joined_step: int = 0
    join: int = 0
    """Which joining of the decode batch this is; 0 when not decoding."""
    running: bool = False
    started_before: bool = False
    cancelled: bool = False

    @property
    def decoding(self) -> bool:
        """Whether it is in the decode batch."""
        return self.join > 0
