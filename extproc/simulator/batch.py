"""The decoding sequences of an engine, advanced together: one token each per step, in O(1) for any number
of steps.

Rules of this file:

- ``step`` counts the engine's steps; a sequence's length is its length at joining plus the steps since;
- a sequence needs a new block in the step that begins with its length a multiple of the block size. Length
  minus step is constant while it decodes, so sequences are counted by that difference modulo the block
  size, and the blocks needed by the next m steps follow from those counts alone;
- the next sequence to finish is the top of a heap; entries of sequences that left early are skipped when met.
"""

from __future__ import annotations

import heapq

from extproc.simulator.sequence import Sequence


class DecodeBatch:
    """Counts over all decoding sequences."""

    __slots__ = ("_block_size", "_finishing", "_joins", "_phases", "kv_tokens", "size", "step")

    def __init__(self, block_size: int) -> None:
        self.step = 0
        self.size = 0
        self.kv_tokens = 0
        """Tokens all of them hold."""
        self._block_size = block_size
        self._phases: dict[int, int] = {}
        self._finishing: list[tuple[int, int, Sequence]] = []
        self._joins = 0

    def join(self, seq: Sequence) -> None:
        """``seq`` has its prefill done and decodes from the next step on."""
        seq.joined_step = self.step
        self._joins += 1
        seq.join = self._joins
        heapq.heappush(self._finishing, (self.step + seq.job.output_tokens - seq.generated, seq.join, seq))
        self.size += 1
        self.kv_tokens += seq.computed
        phase = (seq.computed - self.step) % self._block_size
        self._phases[phase] = self._phases.get(phase, 0) + 1

    def leave(self, seq: Sequence) -> None:
        """``seq`` is done, cancelled or preempted; its ``generated`` and ``computed`` become what they are
        now.
        """
        steps = self.step - seq.joined_step
        phase = (seq.computed - seq.joined_step) % self._block_size
        seq.generated += steps
        seq.computed += steps
        seq.join = 0
        self.size -= 1
        self.kv_tokens -= seq.computed
        left = self._phases[phase] - 1
        if left:
            self._phases[phase] = left
        else:
            del self._phases[phase]

    def generated(self, seq: Sequence, ahead: int = 0) -> int:
        """Output tokens of a decoding sequence, ``ahead`` steps from now."""
        return seq.generated + self.step - seq.joined_step + ahead

    def growth(self, steps: int) -> int:
        """New blocks that the next ``steps`` steps need."""
        cycles, rest = divmod(steps, self._block_size)
        blocks = cycles * self.size
        size, step = self._block_size, self.step
        if rest > len(self._phases):
            blocks += sum(count for phase, count in self._phases.items() if (-step - phase) % size < rest)
        elif rest:
            phases = self._phases
            blocks += sum(phases.get((-step - ahead) % size, 0) for ahead in range(rest))
        return blocks

    def steps_within(self, free: int, steps: int) -> int:
        """The most steps, up to ``steps``, whose growth fits into ``free`` blocks."""
        if (steps // self._block_size + 1) * self.size <= free or self.growth(steps) <= free:
            return steps
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if self.growth(middle) <= free:
                low = middle
            else:
                high = middle
        return low

    def steps_to_finish(self) -> int:
        """Steps until the next sequence is done; the batch is not empty."""
        heap = self._finishing
        while heap[0][2].join != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] - self.step

    def advance(self, steps: int) -> list[Sequence]:
        """Every sequence makes ``steps`` tokens. Returns those that are done; they are still in the batch."""
        self.step += steps
        self.kv_tokens += self.size * steps
        done: list[Sequence] = []
        heap = self._finishing
        while heap and heap[0][0] <= self.step:
            _step, join, seq = heapq.heappop(heap)
            if seq.join == join:
                done.append(seq)
        return done
