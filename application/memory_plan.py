"""Where a run's memory goes, estimated from the shape of its models: arithmetic only, importable without torch.

Each row is an upper estimate of what is held at its own peak. Where rollout and update alternate, the key/value cache
and the activations are not held together, and `peak_bytes` counts the larger of the two; an asynchronous run holds
both, and the engine's copy of the weights.
"""

from collections.abc import Sequence
from enum import StrEnum

from attrs import frozen

from rollgrad.application.choices import KLAgainst
from rollgrad.application.config import RLConfig
from rollgrad.domain.catalogue import estimator_traits

FLOAT32_BYTES = 4
ADAM_MOMENTS = 2

ACTIVATIONS_PER_HIDDEN = 17
"""Numbers kept a token, layer and hidden unit for the backward pass when attention keeps no scores: 34 bytes of 16-bit
numbers (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1)."""

CHECKPOINTED_ACTIVATIONS_PER_HIDDEN = 1
"""Under gradient checkpointing a layer keeps its input only."""


class Phase(StrEnum):
    """When a row's memory is held."""

    ALWAYS = "always"
    ROLLOUT = "rollout"
    UPDATE = "update"


@frozen(kw_only=True)
class ModelShape:
    """What the memory of a decoder depends on. `parameters` counts tied tensors once."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int


@frozen(kw_only=True)
class MemoryRow:
    """One use of memory: `bytes` held in `phase`, and the product they come from."""

    name: str
    bytes: int
    phase: Phase
    formula: str


def memory_plan(
    config: RLConfig,
    actor: ModelShape,
    *,
    compute_bytes: int,
    critic: ModelShape | None = None,
    reference: ModelShape | None = None,
) -> list[MemoryRow]:
    """Memory rows of a run, in bytes.

    `compute_bytes` is the size of one number in the compute format: 2 for bfloat16, 4 for float32, in which case the
    weights are their own masters. `critic` and `reference` default to the actor's shape; they appear only where the
    settings use them.
    """
    rows = _trained("policy", actor, compute_bytes)
    rows.append(_activations("policy", actor, config, compute_bytes))
    rows.append(_kv_cache(actor, config, compute_bytes))
    if config.train.async_enable:
        rows.append(_weights("engine", actor, compute_bytes))
    if "critic" in estimator_traits(config.algo.advantage.estimator).needs:
        rows += _trained("critic", critic or actor, compute_bytes)
        rows.append(_activations("critic", critic or actor, config, compute_bytes))
    if config.algo.kl.init_coef > 0 and config.algo.kl.against is KLAgainst.REFERENCE:
        rows.append(_weights("reference", reference or actor, compute_bytes))
    return rows


def peak_bytes(rows: Sequence[MemoryRow]) -> int:
    """Bytes held at once: what is always held, plus the larger of the rollout and the update.

    Policy and critic are updated one after the other, so of the update's rows only the largest counts.
    """
    always = sum(row.bytes for row in rows if row.phase is Phase.ALWAYS)
    return always + max((row.bytes for row in rows if row.phase is not Phase.ALWAYS), default=0)


def _weights(name: str, shape: ModelShape, compute_bytes: int) -> MemoryRow:
    return _per_parameter(f"{name} weights", shape.parameters, compute_bytes)


def _trained(name: str, shape: ModelShape, compute_bytes: int) -> list[MemoryRow]:
    rows = [_weights(name, shape, compute_bytes)]
    if compute_bytes < FLOAT32_BYTES:
        rows.append(_per_parameter(f"{name} float32 master weights", shape.parameters, FLOAT32_BYTES))
    rows.append(_per_parameter(f"{name} Adam moments", shape.parameters, ADAM_MOMENTS * FLOAT32_BYTES))
    rows.append(_per_parameter(f"{name} gradients", shape.parameters, FLOAT32_BYTES))
    return rows


def _per_parameter(name: str, parameters: int, size: int) -> MemoryRow:
    formula = f"{parameters:,} parameters x {size} bytes"
    return MemoryRow(name=name, bytes=parameters * size, phase=Phase.ALWAYS, formula=formula)


def _activations(name: str, shape: ModelShape, config: RLConfig, compute_bytes: int) -> MemoryRow:
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    tokens = min(max(config.train.max_tokens_per_micro_batch, longest), samples * longest)
    checkpointing = config.actor.gradient_checkpointing
    kept = CHECKPOINTED_ACTIVATIONS_PER_HIDDEN if checkpointing else ACTIVATIONS_PER_HIDDEN
    # Checkpointing recomputes one layer at a time in full.
    per_token = shape.hidden * (shape.layers * kept + (ACTIVATIONS_PER_HIDDEN if checkpointing else 0))
    return MemoryRow(
        name=f"{name} activations",
        bytes=tokens * per_token * compute_bytes,
        phase=Phase.UPDATE,
        formula=f"{tokens:,} tokens of a micro-batch x {per_token:,} numbers x {compute_bytes} bytes",
    )


def _kv_cache(shape: ModelShape, config: RLConfig, compute_bytes: int) -> MemoryRow:
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    ahead = config.train.max_staleness + 1 if config.train.async_enable else 1
    sequences = min(config.rollout.max_batch_size, samples * ahead)
    length = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return MemoryRow(
        name="key/value cache",
        bytes=sequences * length * per_token * compute_bytes,
        phase=Phase.ALWAYS if config.train.async_enable else Phase.ROLLOUT,
        formula=f"{sequences:,} sequences x {length:,} tokens x {per_token:,} numbers x {compute_bytes} bytes",
    )
