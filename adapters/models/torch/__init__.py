"""In-process training with PyTorch on transformers models.

Where to begin: `models.py`, whose `TorchPolicy` is the port `PolicyModel`. What it does, in this order:

1. `loading/`: a transformers model is loaded (`loading.load_causal_lm`), its attention and its recurrent layers are
   replaced, and it is compared with itself as it was (`compatibility.py`). A model that differs is computed padded.
2. `forward.py`: `PackedLM` computes a packed batch in one pass. `layers/layout.py` lays out what sequences share as a
   forest of nodes, and `layers/attention.py` is the plan by which a node's tokens see those before them;
   `layers/recurrent_layers.py` is the same for layers with a state, `layers/padded.py` for models that are padded.
3. `kernels/`: what a GPU computes in one go for these layers.
4. `heads/`: the last hidden states at action tokens become log-probs, or a divergence from a teacher.
5. `optimizers/`: `gradients.optimizer_step` adds up the gradients of micro-batches, and a `TrainedModule` takes the
   step: `MasterOptimizer` in this process, those of `adapters/models/deepspeed` and `adapters/models/fsdp` in several.

`rewards/` has critics and reward models, `experts/` what mixtures of experts need besides, `planning/` the memory of a
pass that is not computed. `recomputation.py` and `offloading.py` trade time for memory in the backward pass, and
`weight_parts.py` and `sent_names.py` are for the way of the weights to engines.
"""
