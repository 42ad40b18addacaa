"""Teaches SmolLM2-135M-Instruct to add, with the whole distributed stack on one machine without a GPU: Ray starts two
training processes that divide the model by DeepSpeed's ZeRO-3, and an engine process in which vLLM samples.

The settings are in `sums_cluster.yaml`. `make demo-cluster` runs this file.
"""

import sys

from smollm2 import train_smollm2

if __name__ == "__main__":
    sys.exit(130 if train_smollm2("sums", __doc__, settings="sums_cluster").interrupted else 0)
