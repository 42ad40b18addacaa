"""Examines every causal language model type of the installed transformers and writes the list in docs/models.md.

    python scripts/model_table.py                  # all types: about five minutes on one core
    python scripts/model_table.py gemma3_text phi3 # these alone; the docs stay as they are

Ends with status 1 where a type is computed wrongly or ends in a traceback.
"""

import sys
import warnings
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.model_sweep import EVERY_TYPE, Finding, document, examine, types


def main(names: list[str]) -> int:
    """Returns the exit status."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: list[Finding] = []
    for name in names or types():
        finding = examine(name)
        found.append(finding)
        gaps = f"log-probs {finding.training:.0e}, gradients {finding.gradient:.0e}, engine {finding.engine:.0e}"
        print(
            f"{'WRONG ' if finding.wrong else ''}{finding.name}: {finding.outcome}. {finding.wrong or gaps}", flush=True
        )
    wrong = [finding.name for finding in found if finding.wrong]
    print(f"{len(found)} examined, {sum(not f.refusal for f in found)} exact, {len(wrong)} wrong: {', '.join(wrong)}")
    if not names and not wrong:
        document(EVERY_TYPE, {finding.name: finding.outcome for finding in found})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
