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

import heapq
import math
from dataclasses import replace
from random import Random

from extproc.simulator.adapters import AdapterSlots
from extproc.simulator.batch import DecodeBatch
from extproc.simulator.blocks import BlockCache
from extproc.simulator.counters import Counters, EngineMetrics
from extproc.simulator.events import (
    Aborted,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Event,
    Finished,
    FirstToken,
    Preempted,
    Rejected,
    Started,
)
from extproc.simulator.job import Job
from extproc.simulator.profile import Profile
from extproc.simulator.sequence import Sequence
from extproc.simulator.step import Run


class Engine:
    """One simulated engine. ``kv_events`` adds BlocksStored, BlocksRemoved and Cleared to what ``advance``
    returns.
    """

    def __init__(self, profile: Profile, rng: Random, *, kv_events: bool = False) -> None:
        self.profile = profile
        self.counters = Counters()
        self.cache = BlockCache(profile.kv_blocks)
        self.slowdown = 1.0
        """Factor on the time of every step that starts from now on."""
        self._rng = rng
        self._kv_events = kv_events
        self._batch = DecodeBatch(profile.block_size)
        self._adapters = AdapterSlots(profile.max_loras, profile.adapter_load_s)
        self._seqs: dict[str, Sequence] = {}
        self._queue: list[tuple[int, int, Sequence]] = []
        self._waiting = 0
        self._waiting_adapters: dict[str, int] = {}
        self._running: dict[Sequence, None] = {}
        self._prefilling: dict[Sequence, None] = {}
        self._leaving: list[Sequence] = []
        self._arrivals = 0
        self._run: Run | None = None
        self._wake: float | None = None
        self._blocked: tuple[int, int] | None = None
        self._now = 0.0
        self._events: list[Event] = []

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
        self._enqueue(seq)
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
            self._forget_waiting(seq)
            self._end(seq, now)
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
        events, self._events = self._events, []
        return events

    def clear_cache(self, now: float) -> bool:
        """Drop the prefix cache. Like vLLM's, it refuses (False) while sequences run."""
        self._pump_before(now)
        if self._running:
            return False
        self.cache.clear()
        if self._kv_events:
            self._events.append(Cleared(now))
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
            waiting=self._waiting,
            kv_usage=used / self.cache.capacity,
            cached_blocks=self.cache.cached,
            running_adapters=self._adapters.running,
            waiting_adapters=tuple(sorted(self._waiting_adapters)),
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
        if not chunks and not made_room:
            steps = batch.steps_within(self.cache.free, batch.steps_to_finish())
        scale = self.slowdown
        if profile.jitter:
            scale *= max(0.1, 1.0 + self._rng.gauss(0.0, profile.jitter / math.sqrt(steps)))
        self._run = Run(at, steps, first * scale, slope * scale, chunks)
        self._report_evictions(at)

    def _make_room(self, at: float) -> bool:
        """Preempt the newest sequences until every decoding one can take its next token. Whether any was
        preempted.
        """
        preempted = False
        while self._batch.growth(1) > self.cache.free:
            seq = next(reversed(self._running))
            self._leave(seq, at)
            seq.names.clear()
            seq.offered = 0
            self.counters.preemptions += 1
            self._events.append(Preempted(seq.job.id, at))
            self._enqueue(seq)
            preempted = True
        return preempted

    def _schedule_chunk(self, seq: Sequence, budget: int, at: float) -> tuple[int, float]:
        """The next prefill chunk of ``seq``: its tokens and seconds. Its full blocks enter the prefix cache
        now.
        """
        chunk = min(seq.target - seq.computed, budget)
        self._offer_blocks(seq, (seq.computed + chunk) // self.profile.block_size, at)
        return chunk, self.profile.prefill_s(chunk, seq.computed)

    def _admit(self, budget: int, at: float, chunks: list[tuple[Sequence, int]]) -> float:
        """Start waiting jobs while the budget, the slots and the blocks last. Returns the seconds their
        chunks cost.
        """
        seconds = 0.0
        reserved = self._batch.growth(1)
        passed_over: list[tuple[int, int, Sequence]] = []
        queue = self._queue
        while queue:
            seq = queue[0][2]
            if seq.cancelled:
                heapq.heappop(queue)
                continue
            adapter = seq.job.adapter
            if adapter is not None and not self._adapters.admits(adapter):
                passed_over.append(heapq.heappop(queue))
                continue
            if (
                budget <= 0
                or len(self._running) >= self.profile.max_num_seqs
                or not self._reserve(seq, reserved)
            ):
                self._blocked = queue[0][:2]
                break
            heapq.heappop(queue)
            self._forget_waiting(seq)
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
            heapq.heappush(queue, entry)
        return seconds

    def _reserve(self, seq: Sequence, reserved: int) -> bool:
        """Hold the blocks of the whole prompt, found or new; False when they are not to be had."""
        size = self.profile.block_size
        target = seq.job.prompt_tokens + seq.generated
        names = seq.job.block_hashes
        found, idle = self.cache.match(names, (target - 1) // size)
        new = self.profile.blocks_for(target) - found
        if new + idle + reserved > self.cache.free:
            return False
        seq.names = list(names[:found])
        self.cache.pin(seq.names)
        self.cache.take(new)
        seq.target = target
        seq.computed = found * size
        seq.offered = found
        return True

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
        self._report_evictions(at)
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

    def _enqueue(self, seq: Sequence) -> None:
        heapq.heappush(self._queue, (seq.job.priority, seq.order, seq))
        self._waiting += 1
        if seq.job.adapter is not None:
            self._waiting_adapters[seq.job.adapter] = self._waiting_adapters.get(seq.job.adapter, 0) + 1

    def _forget_waiting(self, seq: Sequence) -> None:
        """Take ``seq`` out of the counts of the queue; a cancelled one's entry is dropped when it comes to
        the top.
        """
        self._waiting -= 1
        adapter = seq.job.adapter
        if adapter is not None:
            self._waiting_adapters[adapter] -= 1
            if not self._waiting_adapters[adapter]:
                del self._waiting_adapters[adapter]

    def _leave(self, seq: Sequence, at: float) -> None:
        """A running sequence gives back its slot, adapter and blocks; its full blocks stay cached."""
        del self._running[seq]
        seq.running = False
        if seq.decoding:
            self._batch.leave(seq)
            held = self.profile.blocks_for(seq.computed)
        else:
            del self._prefilling[seq]
            held = self.profile.blocks_for(seq.target)
        full = seq.computed // self.profile.block_size
        self._offer_blocks(seq, full, at)
        private = held - len(seq.names)
        self.cache.give_back(seq.names, private, max(0, full - seq.offered))
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

    def _offer_blocks(self, seq: Sequence, full: int, at: float) -> None:
        """Name the full blocks from ``seq.offered`` to ``full``, as far as hashes are known."""
        hashes = seq.job.block_hashes
        first = seq.offered
        end = min(full, len(hashes))
        if end <= first:
            return
        seq.offered = end
        fresh = self.cache.name(hashes[first:end])
        seq.names.extend(fresh)
        if self._kv_events and fresh:
            self._report_evictions(at)
            self._report_stored(seq, first, end, set(fresh), at)

    def _report_stored(self, seq: Sequence, first: int, end: int, fresh: set[int], at: float) -> None:
        """One BlocksStored for every unbroken stretch of new blocks."""
        hashes = seq.job.block_hashes
        index = first
        while index < end:
            start = index
            while index < end and hashes[index] in fresh:
                index += 1
            if index > start:
                parent = hashes[start - 1] if start else None
                self._events.append(BlocksStored(at, seq.job.id, start, tuple(hashes[start:index]), parent))
            else:
                index += 1

    def _report_evictions(self, at: float) -> None:
        """Turn the cache's list of evicted blocks into an event."""
        if self.cache.evicted:
            if self._kv_events:
                self._events.append(BlocksRemoved(at, tuple(self.cache.evicted)))
            self.cache.evicted.clear()
