"""CPU seconds and resident memory of processes over an interval.

CPU comes from the process's own CPU clock (``clock_getcpuclockid(3)``: nanoseconds, all threads, dead ones
too); the tick counters of ``/proc`` are 10 ms wide and would blur short slices. Where that clock cannot be
read, psutil's counters are used.

    python -m loadtest.cpu PID [PID …] --interval 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from loadtest.report import number, table


def cpu_seconds(pid: int) -> float:
    """CPU time (user and system, every thread) a process has used. Raises psutil.NoSuchProcess when it is
    gone."""
    try:
        # The clock id of another process, as glibc makes it: the inverted pid above three bits,
        # CPUCLOCK_SCHED (2).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process. Raises psutil.NoSuchProcess when it is gone."""
    return int(psutil.Process(pid).memory_info().rss)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process used between two readings."""

    cpu_s: float
    wall_s: float
    rss_bytes: int
    """At the second reading."""
    rss_growth_bytes: int

    @property
    def cores(self) -> float:
        """Mean share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


class Meter:
    """Reads a set of named processes; ``lap`` returns what each used since the last lap or the start."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._last = self._read()

    def lap(self) -> dict[str, Usage]:
        """Usage since the last lap, by name."""
        before, now = self._last, self._read()
        self._last = now
        usage = {}
        for name, (cpu, rss, at) in now.items():
            cpu_before, rss_before, at_before = before[name]
            usage[name] = Usage(cpu - cpu_before, at - at_before, rss, rss - rss_before)
        return usage

    def _read(self) -> dict[str, tuple[float, int, float]]:
        return {
            name: (cpu_seconds(pid), rss_bytes(pid), time.monotonic()) for name, pid in self._pids.items()
        }


def main() -> None:
    """Print the usage of some processes over one interval."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.cpu", description="CPU and memory of processes over an interval"
    )
    parser.add_argument("pid", nargs="+", type=int)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds (default 5)")
    given = parser.parse_args()
    meter = Meter({str(pid): pid for pid in given.pid})
    time.sleep(given.interval)
    rows = [
        [pid, number(used.cpu_s * 1e3, 1), number(used.cores, 3), number(used.rss_bytes / 2**20, 1)]
        for pid, used in meter.lap().items()
    ]
    print(table("", ["pid", "cpu ms", "cores", "rss MiB"], rows))


if __name__ == "__main__":
    main()
