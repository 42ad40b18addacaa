"""Runs the tests that failed a second time, one after the other with nothing beside them; ends well if all pass then.

    python scripts/failed_again.py

Tests of engines, clusters and browsers share two cores with others, and a process that does not get to work for a
second may fail one that has no fault. A test that passes now is named, for it is to be mended: it fails somewhere, some
day. More than five failures have another cause, and are not tried again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 5


def main(root: Path = ROOT) -> int:
    """Returns the exit status, for the tests that failed in `root`."""
    failed = list(json.loads((root / ".pytest_cache/v/cache/lastfailed").read_text()))
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed: more than {MOST}, so none is tried again.")
        return 1
    print(f"The {len(failed)} that failed are tried again, alone:", flush=True)
    words = [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures", "none"]
    again = subprocess.run([*words, "-q"], cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if again.returncode == 0:
        print("\n".join(["These tests are flaky, they passed only when alone:", *failed]))
    return again.returncode


if __name__ == "__main__":
    sys.exit(main())
