"""Gives every boundary bad inputs: settings, YAML, data, reward functions, HTTP answers, requests, training states,
commands, models on the disk.

    python scripts/fuzz.py            # all kinds: 2,880 cases (3,260 inputs), ten minutes on one core
    python scripts/fuzz.py data http  # these alone
    python scripts/fuzz.py --seed 7   # other cases

Prints each case that ended in anything but one sentence, and ends with status 1 if there is one.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fuzz import KINDS, cases
from tests.fuzz_cases import outcome


def main(kinds: tyro.conf.Positional[tuple[str, ...]] = (), seed: int = 0) -> int:
    """Returns the exit status."""
    bad = 0
    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # "." is a name of a dataset
            found = [outcome(case) for case in cases(kind, KINDS[kind][1], seed, Path(folder))]
        wrong = [each for each in found if each]
        bad += len(wrong)
        print(f"{kind}: {len(found)} cases, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
