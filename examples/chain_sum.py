"""Teaches SmolLM2-135M-Instruct the sums and differences of reasoning-gym's chain_sum, with GRPO, without a GPU.

The settings are in `chain_sum.yaml`; the prompts, and others for evaluation, come from reasoning-gym's generator.
`make demo-chain-sum` runs this file.
"""

import sys

from smollm2 import train_smollm2

if __name__ == "__main__":
    sys.exit(130 if train_smollm2("chain_sum", __doc__).interrupted else 0)
