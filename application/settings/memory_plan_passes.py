"""Bytes that passes of a model hold at their peak, beside its weights, gradients and optimizer's state: measured for
its own code (`PassMemory`), else by formula; and those of the output embedding and of the embedded engine.

Does not own: which processes hold it (`memory_plan.py`).
"""

import math

from rollgrad.application.settings.derived import longest_sample, sequences_at_once
from rollgrad.application.settings.memory_plan_tokens import group_tokens
from rollgrad.application.settings.model_shape import ModelShape, bytes_of_pass
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.algorithms.settings import KLEstimator

FLOAT32_BYTES = 4

MIB = 2**20

ACTIVATIONS_PER_HIDDEN = 36
"""Numbers kept a token, layer and hidden unit for the backward pass of a model that cannot be measured: the most that
was found of transformers' decoders, where fused layers keep 17 (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", equation 1)."""

WHOLE_ACTIVATIONS_PER_HIDDEN = 11
"""Those of them that tensor parallelism does not divide, 5 of 17 (the same, equation 2)."""

KEPT_PER_HIDDEN = {Checkpointing.FULL: 1, Checkpointing.SELECTIVE: 15}
"""Those that a layer keeps under gradient checkpointing: its input, and the results of attention and products, as many
as in Qwen3-0.6B, whose heads are twice as wide as its states."""

INPUTS_AT_ONCE = 2
"""Inputs of layers on their device at most, where the others are in the machine's memory
(`adapters.models.torch.offloading`)."""

CACHE_BLOCK, PREFILL_TOKENS, SAMPLED_LOGITS = 128, 8192, 6
"""Tokens of a block of the embedded engine's cache; prompt tokens, padding included, that it computes in one pass at
most (a longer prompt goes alone), which bounds the memory of activations; and copies of a step's logits that sampling
holds at once: sorted ones, their order, and running sums."""


LOGITS_OF_A_SLICE, MASKED_LOGITS = 3, 2.5
"""Sizes of a slice's logits that the output embedding holds at once, and those more where other tokens than the
possible ones are taken out of it: two copies of its logits, and two bytes for each number of 4 that say which."""

FUSED_LOGITS = 2
"""Results of the product with the output embedding, in its format, that it holds of a slice where a GPU fuses what
follows (`adapters.models.torch.kernels.fusing`): one, and its gradient."""

DISTILLED_SLICES = 8
"""Part of a slice that one has where whole distributions are compared with a teacher's
(`adapters.models.torch.heads.distillation`)."""

DISTILLED_LOGITS, FUSED_DISTILLED_LOGITS = 14, 8
"""Sizes of such a slice's float32 logits that are held at once, and those where a GPU fuses what follows the products
with both output embeddings: the most that torch's graphs allocated, of a divergence between the ends (its `beta`), at a
temperature of its own, of logits with a cap."""


EXCHANGED = 3
"""Copies of queries, keys and values that are held where processes exchange them: as they are sent, as they come, and
in their order. Of a reference in two processes 2.3 were measured beside what it holds otherwise."""

CENTRED_BYTES = 48
"""Bytes of a likely token at an action token in an update with score centering: its id and its log-prob under both
policies, and what is made of them; 33 were measured of the passes, and 12 are of the sampler."""


def training_bytes(config: RLConfig, shape: ModelShape, tokens: int, compute_bytes: int, head: int, gpu: int) -> int:
    """Returns what the forward and backward pass of actor or critic hold at their peak, on a GPU of `gpu` bytes or
    without one (0); `head` is held by the output embedding between the two."""
    of_layer = _activations_per_hidden(config)
    if shape.passes is not None:
        share = tokens * of_layer / ACTIVATIONS_PER_HIDDEN
        # The head's gradient comes before those of the layers.
        return max(bytes_of_pass(shape.passes.saved, share) + head, bytes_of_pass(shape.passes.trained, share))
    kept = KEPT_PER_HIDDEN.get(config.actor.gradient_checkpointing)
    # Checkpointing recomputes one layer at a time in full.
    numbers = shape.layers * of_layer if kept is None else shape.layers * kept + of_layer
    if config.actor.offload_activations:
        numbers += min(INPUTS_AT_ONCE, shape.layers) - (shape.layers if gpu else 0)
    return math.ceil(tokens * shape.hidden * numbers * compute_bytes) + head


def offloaded_bytes(config: RLConfig, shape: ModelShape, tokens: int, compute_bytes: int) -> int:
    """Returns the bytes of the machine's memory that inputs of layers have while a model on a GPU is trained: torch
    gives pinned memory in powers of two."""
    if not config.actor.offload_activations:
        return 0
    return int(shape.layers * 2 ** math.ceil(math.log2(tokens * shape.hidden * compute_bytes)))


def scoring_bytes(
    config: RLConfig, shape: ModelShape, tokens: int, compute_bytes: int, *, prompts: bool = False
) -> int:
    """Returns the bytes that a pass of `tokens` without gradients holds at its peak, the output embedding left out;
    of `prompts` or of whole sequences."""
    of_layer = _activations_per_hidden(config)
    if shape.passes is None:
        return math.ceil(tokens * shape.hidden * of_layer * compute_bytes)
    points = (shape.passes.prompted if prompts else ()) or shape.passes.scored
    return bytes_of_pass(points, tokens * of_layer / ACTIVATIONS_PER_HIDDEN)


def repeated_bytes(
    config: RLConfig, shape: ModelShape, repeated: int, compute_bytes: int, *, trained: bool = False
) -> int:
    """Returns what a pass holds for `repeated` tokens: those of which a sequence has a copy of keys and values that it
    shares with others. One layer at a time has copies. If a backward pass follows that does not compute layers again,
    all layers keep theirs; and one layer has their gradients, which are at the peak if keys have as many heads as
    queries."""
    kept = shape.keeping if trained and config.actor.gradient_checkpointing is Checkpointing.OFF else 1
    numbers = 2 * shape.kv_heads * shape.head_dim / config.ds.tensor_parallel_size
    return math.ceil(repeated * numbers * compute_bytes * (kept + trained))


def exchanged_bytes(
    config: RLConfig, shape: ModelShape, tokens: int, compute_bytes: int, *, trained: bool = False
) -> int:
    """Returns the bytes that a pass over `tokens` of a process's own holds for other processes of the same sequence
    (`adapters.models.torch.layers.sequence_parallel`).

    The layer that computes has `EXCHANGED` copies: of the tokens' queries, keys and values and of the keys and values
    of other teams' tokens, or of what states are computed from, whichever is more. The keys and values that queries see
    are kept for the backward pass, unless that computes the layer again.
    """
    size = config.ds.sequence_parallel_size
    if size == 1:
        return 0
    heads = math.gcd(size, shape.kv_heads)
    teams = size // heads
    own = tokens * 2 * shape.kv_heads * shape.head_dim * compute_bytes
    queries = tokens * shape.query_heads * shape.head_dim * compute_bytes if heads > 1 else 0
    kept = shape.keeping - 1 if trained and config.actor.gradient_checkpointing is Checkpointing.OFF else 0
    of_teams = kept * (teams - 0.5) if teams > 1 else 0
    at_once = max(queries + teams * own, tokens * shape.columns * compute_bytes)
    return math.ceil(EXCHANGED * at_once + own * of_teams)


def head_bytes(
    config: RLConfig, shape: ModelShape, tokens: int, compute_bytes: int, gpu: int, *, gradients: bool = False
) -> int:
    """Returns the bytes that the output embedding holds at its peak, in a pass of `tokens` tokens.

    That is a slice of logits with what is computed of it (`adapters.models.torch.heads.chunked_logprobs`). A model that
    is trained adds the gradient of the output embedding: a float32 sum, a product and, in another format, the sum in
    it; and with score centering `CENTRED_BYTES` of each likely token. Where agents may prescribe the form of replies,
    there is also a bit for each action token and token of the vocabulary, twice on a CPU
    (`adapters.models.torch.heads.allowed_tokens`).

    Where two rows of it alone are read (`adapters.models.torch.heads.scorers.OutcomeScorer`), these are the hidden
    states in float32, their gradient, and that of all rows. Processes that divide the vocabulary compute all rows
    there, too.

    Args:
        config: settings of the run.
        shape: shape of the model.
        tokens: number of tokens of the pass.
        compute_bytes: bytes of a number of the weights.
        gpu: bytes of the GPU; 0 without one.
        gradients: whether the model is trained.
    """
    if shape.compares and config.ds.tensor_parallel_size == 1:
        return tokens * shape.hidden * 2 * FLOAT32_BYTES + (0 if shape.adapters else shape.embedding * compute_bytes)
    prescribed = _may_prescribe(config)
    actions = _actions_of(config, tokens, prescribed)
    logits = actions * shape.embedding // shape.hidden  # V a token; the embedding has V x H numbers
    masks = math.ceil(logits / 8) * (1 if gpu else 2) if prescribed else 0
    slices = _slice_bytes(config, logits * FLOAT32_BYTES, compute_bytes, gpu)
    if not gradients:
        return masks + slices
    centred = actions * config.algo.score_centering_top_k * CENTRED_BYTES
    if shape.adapters:  # the output embedding is frozen
        return masks + centred + slices
    of_gradient = FLOAT32_BYTES + (2 * compute_bytes if compute_bytes < FLOAT32_BYTES else 0)
    return masks + centred + slices + shape.embedding // config.ds.tensor_parallel_size * of_gradient


def _may_prescribe(config: RLConfig) -> bool:
    """Returns whether agents are programs, which may prescribe the form of replies."""
    return config.train.agent_func_path is not None or config.agent.command is not None


def _actions_of(config: RLConfig, tokens: int, prescribed: bool) -> int:
    """Returns how many of `tokens` may be action tokens."""
    # An agent's replies may be nearly all of its tokens; those to one prompt follow one copy of it.
    replies = config.rollout.n_samples_per_prompt * config.rollout.max_new_tokens
    share = 1.0 if prescribed or config.agent.plays else replies / group_tokens(config)
    return math.ceil(min(1.0, share) * tokens)


def _slice_bytes(config: RLConfig, logit_bytes: int, compute_bytes: int, gpu: int) -> int:
    """Returns the bytes of a slice of float32 logits, and of what is computed of it, if all logits have `logit_bytes`:
    its softmax and their product, or less where a GPU fuses these, and masks where agents prescribe replies."""
    at_once = max(64 * MIB, gpu // 64)
    fused = gpu and not config.actor.deterministic
    if config.algo.kl.estimator == KLEstimator.FULL:  # each process has the logits of the whole vocabulary
        return (FUSED_DISTILLED_LOGITS if fused else DISTILLED_LOGITS) * min(logit_bytes, at_once // DISTILLED_SLICES)
    prescribed = _may_prescribe(config)
    copies: float = LOGITS_OF_A_SLICE + (MASKED_LOGITS if prescribed else 0)
    if fused and not prescribed:
        copies = FUSED_LOGITS if config.actor.float32_head else FUSED_LOGITS * compute_bytes / FLOAT32_BYTES
    return math.ceil(copies * min(logit_bytes // config.ds.tensor_parallel_size, at_once))


def embedded_bytes(config: RLConfig, shape: ModelShape, compute_bytes: int) -> int:
    """Returns what the embedded engine holds: keys and values in whole blocks, states, and a pass over prompts or a
    step of all sequences; of a model that is computed padded, a pass over whole sequences."""
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    ahead = config.train.max_staleness + 1 if config.train.async_enable else 1
    sequences = min(sequences_at_once(config), samples * ahead)
    length = math.ceil(longest_sample(config) / CACHE_BLOCK) * CACHE_BLOCK
    padded = shape.passes is not None and shape.passes.padded
    numbers = 0 if padded else 2 * shape.keeping * shape.kv_heads * shape.head_dim
    prompt = longest_sample(config) if padded else config.data.prompt_limit
    once = max(prompt, min(PREFILL_TOKENS, sequences * prompt))
    logits = SAMPLED_LOGITS * sequences * (shape.embedding // shape.hidden) * FLOAT32_BYTES
    kept = sequences * (length * numbers * compute_bytes + (0 if padded else shape.state_bytes))
    return kept + max(scoring_bytes(config, shape, once, compute_bytes, prompts=not padded), logits)


def _activations_per_hidden(config: RLConfig) -> float:
    divided = ACTIVATIONS_PER_HIDDEN - WHOLE_ACTIVATIONS_PER_HIDDEN
    return WHOLE_ACTIVATIONS_PER_HIDDEN + divided / config.ds.tensor_parallel_size
