"""The memory that there is, and that this process may still take."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of a container's control group, of version 2 and 1: its limit, its use, and how much of that can be dropped."""


def total_memory() -> int:
    """Returns the bytes of the machine's memory, or the limit of its container's where that is less."""
    rooms = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit, *_ in CGROUPS:
        if (CGROUP / limit).is_file() and (most := (CGROUP / limit).read_text().strip()).isdigit():
            rooms.append(int(most))
    return min(rooms)


def available_memory() -> int:
    """Returns the bytes of the machine's memory, or of its container's where that has a limit, that are free or can be
    freed at once; on systems other than Linux all of it."""
    rooms = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if MEMINFO.is_file():
        rooms.append(1024 * _numbers(MEMINFO)["MemAvailable:"])
    for limit, use, kinds, files in CGROUPS:
        if (CGROUP / limit).is_file() and (most := (CGROUP / limit).read_text().strip()).isdigit():
            rooms.append(int(most) - int((CGROUP / use).read_text()) + _numbers(CGROUP / kinds)[files])
    return max(0, min(rooms))


def _numbers(path: Path) -> dict[str, int]:
    """Returns the second word of each line, by the first."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}
