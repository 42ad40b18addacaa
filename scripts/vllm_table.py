"""Pushes weights of types of models to vLLM and writes the list in docs/models.md.

    python scripts/vllm_table.py            # all that are examined: about a minute each
    python scripts/vllm_table.py gpt_oss    # these alone, of models that see images too; the docs stay as they are

Ends with status 1 where vLLM takes weights and computes something else without an error. Types for which a package is
missing here keep their places.
"""

import os
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.forked_spawns import forked_by
from tests.scripts import QUIET, VLLM_MODULES, ScriptHost

os.environ |= QUIET
from tests.model_sweep import document, documented
from tests.vllm_image_sweep import examine as examine_images
from tests.vllm_sweep import IN_VLLM, NEEDS, TYPES, Finding, examine


def main(names: list[str]) -> int:
    """Returns the exit status."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        host = ScriptHost(Path(folder), VLLM_MODULES, QUIET)  # whose forks need not import vLLM
        try:
            with forked_by(host.python()):
                for name in names or [each for each in TYPES if each not in NEEDS or find_spec(NEEDS[each])]:
                    found.append(examine(name) if name in TYPES else examine_images(name))
                    gaps = f"before {found[-1].before:.0e}, after {found[-1].after:.0e}, moved {found[-1].moved:.0e}"
                    print(f"{found[-1].name}: {found[-1].outcome}. {found[-1].error or gaps}", flush=True)
        finally:
            host.close()
    if not names:
        outcomes = documented(IN_VLLM) | {finding.name: finding.outcome for finding in found}
        document(IN_VLLM, {name: outcomes[name] for name in TYPES})
    return 1 if any(not finding.exact and not finding.error for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
