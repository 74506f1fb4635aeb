"""A continuous-batching inference engine as a plain object in virtual time.

It follows vLLM's scheduler (V1, chunked prefill, prefix caching, recompute preemption) closely enough that
queues, hit ratios and latencies have the right shape, and costs O(events): a stretch of decode steps in
which nothing is admitted, finished or preempted is one computation, whatever its length.

Rules of this file:

- the engine works in steps. A step's budget of ``max_num_batched_tokens`` goes first to one token for every
  decoding sequence, then to prefills in progress, then to new jobs in order of (priority, arrival);
- a job starts when a sequence slot, its adapter and free blocks for its whole prompt are there; its first
  token comes at the end of the step that prefills its last prompt token. At least one prompt token is
  always computed, even on a full cache hit;
- prompt blocks enter the prefix cache when their chunk is scheduled, generated blocks when the sequence
  leaves;
- a decode step that lacks a block preempts the newest sequence: its blocks are freed, it waits at the front
  and is recomputed;
- arrivals and cancellations take effect at the end of the step in progress. Jobs that arrive at one instant
  share a step.

Driving it: ``submit`` and ``cancel`` as they happen, then ``advance(now)`` at ``next_event()`` or any later
time, which returns what happened since. Time never runs backwards.
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from extproc.simulator.adapters import AdapterSlots
from extproc.simulator.batch import DecodeBatch
from extproc.simulator.counters import Counters, EngineMetrics
from extproc.simulator.events import (
    Aborted,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Rejected,
    Started,
)
from extproc.simulator.job import Job
from extproc.simulator.memory import KvMemory
from extproc.simulator.profile import Profile
from extproc.simulator.queue import WaitingQueue
from extproc.simulator.sequence import Sequence
from extproc.simulator.step import Run


class Engine:
    """One simulated engine. ``kv_events`` adds BlocksStored, BlocksRemoved and Cleared to what ``advance``
    returns.
    """

    def __init__(self, profile: Profile, rng: Random, *, kv_events: bool = False) -> None:
        self.profile = profile
        self.counters = Counters()
        self.slowdown = 1.0
        """Factor on the time of every step that starts from now on."""
        self._stalled_until = float("-inf")
        self._rng = rng
        self._batch = DecodeBatch(profile.block_size)
        self._adapters = AdapterSlots(profile.max_loras, profile.adapter_load_s)
        self._seqs: dict[str, Sequence] = {}
        self._queue = WaitingQueue()
        self._running: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []
        self._arrivals = 0
        self._run: Run | None = None
        self._wake: float | None = None
        self._blocked: tuple[int, int] | None = None
        self._now = 0.0
        self._events: list[Event] = []
        self._memory = KvMemory(profile, self._events if kv_events else None)
        self.cache = self._memory.cache

    # -- what drivers call -------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """Take a job in at ``now``. One that can never run is reported as Rejected.

        Raises:
            ValueError: a job of this id is in the engine already.
        """
        if job.id in self._seqs:
            raise ValueError(f"job {job.id!r} is in the engine already")
        self._pump_before(now)
        reason = self._reason_against(job)
        if reason is not None:
            self.counters.rejected += 1
            self._events.append(Rejected(job.id, now, reason))
            return
        seq = Sequence(job, self._arrivals, now)
        self._arrivals += 1
        self._seqs[job.id] = seq
        self._queue.push(seq)
        if self._run is None:
            self._wake = now
        elif self._blocked is None or (job.priority, seq.order) < self._blocked:
            self._run.stop_after_current(now)

    def cancel(self, job_id: str, now: float) -> None:
        """The client of a job has gone. Unknown and finished ids are ignored."""
        self._pump_before(now)
        seq = self._seqs.get(job_id)
        if seq is None or seq.cancelled:
            return
        seq.cancelled = True
        if seq.running:
            self._leaving.append(seq)
        else:
            self._queue.forget(seq)
            self._end(seq, now)
        if self._run is not None:
            self._run.stop_after_current(now)

    def stall(self, seconds: float, now: float) -> None:
        """Hang: no step begins for so long. Metrics go on to be shown, as vLLM's front end does."""
        self._pump_before(now)
        self._stalled_until = max(self._stalled_until, now + seconds)
        if self._run is not None:
            self._run.stop_after_current(now)

    def next_event(self) -> float | None:
        """When ``advance`` next has something to do; None while the engine is idle."""
        if self._events:
            return self._now
        if self._run is not None:
            return self._run.end
        return self._wake

    def advance(self, now: float) -> list[Event]:
        """Let time pass up to and including ``now``; returns all events since the last call, in order."""
        while (due := self._due()) is not None and due <= now:
            self._turn(due)
        self._now = max(self._now, now)
        events = self._events.copy()
        self._events.clear()
        return events

    def clear_cache(self, now: float) -> bool:
        """Drop the prefix cache. Like vLLM's, it refuses (False) while sequences run."""
        self._pump_before(now)
        if self._running:
            return False
        self._memory.clear(now)
        return True

    def generated(self, job_id: str, now: float) -> int:
        """Output tokens a job has made by ``now`` (not beyond the end of the run in progress); 0 for
        unknown ids.
        """
        seq = self._seqs.get(job_id)
        if seq is None:
            return 0
        if not seq.decoding:
            return seq.generated
        return self._batch.generated(seq, self._ahead(now))

    def metrics(self, now: float) -> EngineMetrics:
        """Gauges and counters at ``now``, the progress of the run in progress included."""
        ahead = self._ahead(now)
        counters = replace(self.counters)
        counters.generation_tokens += ahead * self._batch.size
        used = self.cache.used + (self._batch.growth(ahead) if ahead else 0)
        return EngineMetrics(
            running=len(self._running),
            waiting=len(self._queue),
            kv_usage=used / self.cache.capacity,
            cached_blocks=self.cache.cached,
            running_adapters=self._adapters.running,
            waiting_adapters=self._queue.adapters,
            counters=counters,
        )

    # -- time --------------------------------------------------------------------------------------

    def _due(self) -> float | None:
        return self._run.end if self._run is not None else self._wake

    def _pump_before(self, now: float) -> None:
        """Do what was due before ``now``; what is due at ``now`` waits, so that simultaneous arrivals share
        a step.
        """
        while (due := self._due()) is not None and due < now:
            self._turn(due)
        self._now = max(self._now, now)

    def _turn(self, at: float) -> None:
        """End the run that is due at ``at``, if any, and begin the next."""
        run, self._run, self._wake = self._run, None, None
        if run is not None:
            self._complete(run, at)
        self._begin(at)

    def _ahead(self, now: float) -> int:
        """Decode steps of the run in progress that are done by ``now``."""
        return self._run.done_by(now) if self._run is not None else 0

    # -- a step ------------------------------------------------------------------------------------

    def _begin(self, at: float) -> None:
        """Compose the next step, or a stretch of equal decode steps."""
        made_room = self._make_room(at)
        batch, profile = self._batch, self.profile
        budget = profile.max_num_batched_tokens - batch.size
        seconds = 0.0
        chunks: list[tuple[Sequence, int]] = []
        for seq in self._prefilling:
            if budget <= 0:
                break
            chunk, cost = self._schedule_chunk(seq, budget, at)
            budget -= chunk
            seconds += cost
            chunks.append((seq, chunk))
        self._blocked = None
        if not made_room:
            seconds += self._admit(budget, at, chunks)
        if not self._running:
            return
        first = (
            profile.decode_base_s
            + profile.decode_per_seq_s * batch.size
            + profile.decode_per_kv_token_s * batch.kv_tokens
            + seconds
        )
        slope = profile.decode_per_kv_token_s * batch.size
        steps = 1
        pause = max(self._stalled_until - at, 0.0)
        if not chunks and not made_room and not pause:
            steps = batch.steps_within(self.cache.free, batch.steps_to_finish())
        scale = self.slowdown
        if profile.jitter:
            scale *= max(0.1, 1.0 + self._rng.gauss(0.0, profile.jitter / math.sqrt(steps)))
        self._run = Run(at, steps, pause + first * scale, slope * scale, chunks)
        self._memory.report_evictions(at)

    def _make_room(self, at: float) -> bool:
        """Preempt the newest sequences until every decoding one can take its next token. Whether any was
        preempted.
        """
        preempted = False
        while self._batch.growth(1) > self.cache.free:
            seq = next(reversed(self._running))
            self._leave(seq, at)
            self.counters.preemptions += 1
            self._events.append(Preempted(seq.job.id, at))
            self._queue.push(seq)
            preempted = True
        return preempted

    def _schedule_chunk(self, seq: Sequence, budget: int, at: float) -> tuple[int, float]:
        """The next prefill chunk of ``seq``: its tokens and seconds. Its full blocks enter the prefix cache
        now.
        """
        chunk = min(seq.target - seq.computed, budget)
        self._memory.offer(seq, seq.computed + chunk, at)
        return chunk, self.profile.prefill_s(chunk, seq.computed)

    def _admit(self, budget: int, at: float, chunks: list[tuple[Sequence, int]]) -> float:
        """Start waiting jobs while the budget, the slots and the blocks last. Returns the seconds their
        chunks cost.
        """
        seconds = 0.0
        reserved = self._batch.growth(1)
        passed_over = []
        queue = self._queue
        while (seq := queue.first()) is not None:
            adapter = seq.job.adapter
            if adapter is not None and not self._adapters.admits(adapter):
                passed_over.append(queue.pass_over())
                continue
            full = budget <= 0 or len(self._running) >= self.profile.max_num_seqs
            if full or not self._memory.reserve(seq, reserved):
                self._blocked = (seq.job.priority, seq.order)
                break
            queue.pop()
            self._running[seq] = None
            self._prefilling[seq] = None
            seq.running = True
            if adapter is not None:
                seconds += self._adapters.take(adapter)
            self._count_start(seq, at)
            chunk, cost = self._schedule_chunk(seq, budget, at)
            budget -= chunk
            seconds += cost
            chunks.append((seq, chunk))
        for entry in passed_over:
            queue.put_back(entry)
        return seconds

    def _count_start(self, seq: Sequence, at: float) -> None:
        """Count and report a start; the cache's hit counters see each job once."""
        if not seq.started_before:
            seq.started_before = True
            seq.cached = seq.computed
            self.counters.prefix_queries += seq.target
            self.counters.prefix_hits += seq.computed
        self._events.append(Started(seq.job.id, at, seq.computed))

    def _complete(self, run: Run, at: float) -> None:
        """The run's steps are done: tokens are there, prefills end, sequences finish."""
        batch = self._batch
        self.cache.take(batch.growth(run.steps))
        self.counters.generation_tokens += batch.size * run.steps
        done = batch.advance(run.steps)
        self._memory.report_evictions(at)
        for seq in done:
            self._leave(seq, at)
            self._finish(seq, at)
        for seq, chunk in run.chunks:
            seq.computed += chunk
            if seq.computed == seq.target:
                self._end_prefill(seq, at)
        for seq in self._leaving:
            if seq.running:
                self._leave(seq, at)
                self._end(seq, at)
        self._leaving.clear()

    def _end_prefill(self, seq: Sequence, at: float) -> None:
        """The last prompt token is computed, which yields the next output token."""
        job = seq.job
        first = not seq.generated
        if first:
            self.counters.prompt_tokens += job.prompt_tokens
            self.counters.cached_prompt_tokens += seq.cached
            self.counters.computed_prompt_tokens += job.prompt_tokens - seq.cached
        if job.output_tokens:
            seq.generated += 1
            self.counters.generation_tokens += 1
            if first:
                self.counters.first_tokens += 1
                self._events.append(FirstToken(job.id, at, at - seq.arrived))
        if seq.generated >= job.output_tokens:
            self._leave(seq, at)
            self._finish(seq, at)
            return
        del self._prefilling[seq]
        self._batch.join(seq)

    # -- coming and going --------------------------------------------------------------------------

    def _reason_against(self, job: Job) -> str | None:
        """Why a job can never run here, or None."""
        if job.prompt_tokens < 1 or job.output_tokens < 0:
            return "the prompt must have at least one token"
        if self.profile.blocks_for(job.prompt_tokens + job.output_tokens) > self.profile.kv_blocks:
            return "the request does not fit into the KV cache"
        if job.adapter is not None and not self.profile.max_loras:
            return "adapters are not enabled"
        return None

    def _leave(self, seq: Sequence, at: float) -> None:
        """A running sequence gives back its slot, adapter and blocks; its full blocks stay cached."""
        del self._running[seq]
        seq.running = False
        if seq.decoding:
            self._batch.leave(seq)
            self._memory.release(seq, seq.computed, at)
        else:
            del self._prefilling[seq]
            self._memory.release(seq, seq.target, at)
        if seq.job.adapter is not None:
            self._adapters.give_back(seq.job.adapter)

    def _finish(self, seq: Sequence, at: float) -> None:
        del self._seqs[seq.job.id]
        self.counters.finished += 1
        self._events.append(Finished(seq.job.id, at, at - seq.arrived, seq.generated))

    def _end(self, seq: Sequence, at: float) -> None:
        del self._seqs[seq.job.id]
        self.counters.aborted += 1
        self._events.append(Aborted(seq.job.id, at, seq.generated))
