"""New memory of large tensors comes in huge pages, also in the processes that a run starts."""

import subprocess
import sys

SCRIPT = """
import rollgrad, torch, sys

tensor = torch.zeros(2**24)
found = False
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition(" ")
    if "-" in first:
        start, stop = (int(end, 16) for end in first.split("-"))
        found = start <= tensor.data_ptr() + 2**24 < stop
    elif found and first == "VmFlags:":
        print("hg" in rest.split())
"""


def test_large_tensors_ask_for_huge_pages() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True"]
