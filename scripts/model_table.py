"""Examines every causal language model type of the installed transformers and writes the list in docs/models.md.

    python scripts/model_table.py                  # all types: about five minutes on one core
    python scripts/model_table.py --newest         # with the newest transformers that is allowed: what differs
    python scripts/model_table.py gemma3_text phi3 # these alone; the docs stay as they are

Ends with status 1 where a type is computed wrongly or ends in a traceback.
"""

import sys
import warnings
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.model_sweep import EVERY_TYPE, NEWEST, Finding, document, documented, examine, types


def main(names: list[str]) -> int:
    """Returns the exit status."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    newest = names == ["--newest"]
    whole = newest or not names
    found: list[Finding] = []
    for name in types() if whole else names:
        finding = examine(name)
        found.append(finding)
        gaps = f"log-probs {finding.training:.0e}, gradients {finding.gradient:.0e}, engine {finding.engine:.0e}"
        print(
            f"{'WRONG ' if finding.wrong else ''}{finding.name}: {finding.outcome}. {finding.wrong or gaps}", flush=True
        )
    wrong = [finding.name for finding in found if finding.wrong]
    print(f"{len(found)} examined, {sum(not f.refusal for f in found)} exact, {len(wrong)} wrong: {', '.join(wrong)}")
    outcomes = {finding.name: finding.outcome for finding in found}
    if newest:  # reasons are worded anew in each version
        before = {name: outcome.partition(" (")[0] for name, outcome in documented(EVERY_TYPE).items()}
        outcomes = {name: text for name, text in outcomes.items() if before.get(name) != text.partition(" (")[0]}
    if whole and not wrong:
        document(NEWEST if newest else EVERY_TYPE, outcomes)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
