"""Distils a fine-tuned SmolLM2-135M-Instruct into the one that it began as, on one machine without a GPU.

The settings are in `kd.yaml`. The teacher is the model of `make demo-sft`, trained first where it is missing: it costs
no download. `make demo-kd` runs this file; flags of `rollgrad train kd` override its settings.
"""

import sys
from pathlib import Path

from smollm2 import train_on_examples

if __name__ == "__main__":
    # A teacher of the caller's own, or a question that no teacher is needed for.
    without = ("--teacher.model_name_or_path", "--help", "-h", "--print_config")
    if not any(word.startswith(without) for word in sys.argv) and not Path("runs/sft/model/config.json").exists():
        code = train_on_examples("sft")
        if code:
            sys.exit(code)
    sys.exit(train_on_examples("kd", sys.argv[1:]))
