"""The processor cores that this process may use."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Returns how many cores this process may use at a time: the machine's cores on which it may run, or, if that is
    less, the number of cores whose time its container gets; at least one.

    More threads than that are stopped together for most of each tenth of a second
    (https://docs.kernel.org/scheduler/sched-bwc.html).
    """
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _numbers("cpu.max") or _numbers("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us") or (0, 1)
    return max(1, min(affine, quota // period)) if quota > 0 else affine


def _numbers(*files: str) -> tuple[int, int] | None:
    """Returns the time that a container may take in a period, and the period; None where files of its control group,
    of version 2 or 1, name no limit."""
    words = [word for file in files if (CGROUP / file).is_file() for word in (CGROUP / file).read_text().split()]
    return (int(words[0]), int(words[1])) if len(words) == 2 and words[0] != "max" else None
