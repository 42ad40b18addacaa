"""A plugin of pytest that says how long each file of tests takes, which decides how a suite keeps its cores busy.

    TIMELINE=/tmp/timeline.jsonl PYTHONPATH=. make ci PYTEST_ADDOPTS="-p tests.timeline"
    python -m tests.timeline /tmp/timeline.jsonl

Each line of the file has a process of xdist, a file of tests, when it began and ended in seconds of the clock, and the
CPU seconds of the process and of all that it has started; those of processes that outlived their parents are missing.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_began: dict[str, tuple[float, float]] = {}


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its descendants until now."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    file = item.location[0]
    if file not in _began:
        _began[file] = time.time(), cpu_seconds()
    result = yield
    if nextitem is None or nextitem.location[0] != file:
        began, cpu = _began.pop(file)
        line = {"worker": os.environ.get("PYTEST_XDIST_WORKER", "-"), "file": file, "began": began}
        line |= {"ended": time.time(), "cpu": cpu_seconds() - cpu}
        with Path(os.environ["TIMELINE"]).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    return result


def main(path: str) -> None:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    start = min(line["began"] for line in lines)
    busy: defaultdict[str, float] = defaultdict(float)
    print("worker   begins     ends  seconds      cpu  file")
    for line in sorted(lines, key=lambda line: (line["worker"], line["began"])):
        seconds = line["ended"] - line["began"]
        busy[line["worker"]] += seconds
        times = (line["began"] - start, line["ended"] - start, seconds, line["cpu"])
        print(f"{line['worker']:>6}", *(f"{value:8.1f}" for value in times), f" {line['file']}")
    for worker, seconds in sorted(busy.items()):
        print(f"{worker:>6} busy for {seconds:.0f} s of {max(line['ended'] for line in lines) - start:.0f}")


if __name__ == "__main__":
    main(sys.argv[1])
