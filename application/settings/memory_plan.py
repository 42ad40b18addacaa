"""Memory plan of a run, estimated from the shape of its models: arithmetic only, importable without torch.

Each number is an upper estimate of what one process of a role holds at its own peak. Roles that share a device are
added up; what they hold at different times is not: models pass over their tokens one after the other, and where rollout
and update take turns neither goes on during the other. Does not own: who runs where (`entrypoints.cluster`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve, frozen

from rollgrad.application.settings.derived import longest_sample, ranks
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ds import BUCKET_NUMBERS, GRADIENTS, PARAMETERS
from rollgrad.application.settings.sections.reward import REWARD_TOKENS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import CPU_CACHE_BYTES
from rollgrad.domain.algorithms.catalogue import estimator_traits
from rollgrad.domain.algorithms.settings import KLAgainst

FLOAT32_BYTES = 4

QUANTISED_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bytes of a number in NF4 with double quantisation: an 8-bit scale for 64 of them, a 32-bit one for 256 scales
(Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3)."""

ADAM_MOMENTS = 2

ACTIVATIONS_PER_HIDDEN = 17
"""Numbers kept a token, layer and hidden unit for the backward pass when attention keeps no scores: 34 bytes of 16-bit
numbers (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 1)."""

WHOLE_ACTIVATIONS_PER_HIDDEN = 5
"""Those of them that tensor parallelism does not divide (the same, equation 2)."""

CHECKPOINTED_ACTIVATIONS_PER_HIDDEN = 1
"""Under gradient checkpointing a layer keeps its input only."""

GATHERED_NUMBERS = 1_000_000_000
"""Parameters that ZeRO's last stage keeps whole at once for a pass, DeepSpeed's default."""

MIB = 2**20


@frozen(kw_only=True)
class ModelShape:
    """Shape of a decoder, on which its memory depends. `parameters` counts tied tensors once, and no adapters;
    `adapters` counts the numbers in these, which are then all that is trained; `quantised` those that are kept in 4
    bits; `embedding` those of the input embedding, which is `tied` to the output's if both are one."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    adapters: int = 0
    quantised: int = 0
    embedding: int = 0
    tied: bool = False

    @property
    def trained(self) -> int:
        """Numbers that have gradients."""
        return self.adapters or self.parameters

    def weights(self, compute_bytes: int) -> int:
        """Bytes of all weights."""
        others = self.parameters - self.quantised + self.adapters
        return others * compute_bytes + math.ceil(self.quantised * QUANTISED_BITS / 8)

    def dequantised(self, compute_bytes: int) -> int:
        """Bytes that a pass has of dequantised weights at once: those of one matrix, so less than of one layer."""
        return math.ceil(self.quantised / self.layers) * compute_bytes


@frozen(kw_only=True)
class Machine:
    """Bytes of memory: of one GPU, 0 where there is none, and of the machine. Every machine is taken to be alike."""

    gpu: int
    memory: int


@frozen(kw_only=True)
class RoleMemory:
    """Bytes that one process of a role holds: on its GPU, or in the machine's memory where there are no GPUs.

    `passes` are the activations of a pass, and what ZeRO gathers for it: gradients on their way, and at the last stage
    weights; of an engine keys and values. `offloaded` lies in the machine's memory, the rest on a GPU. Roles of one
    `device` share it. An engine that `takes_turns` holds nothing while models train, which hold no activations
    meanwhile.
    """

    role: str
    processes: int
    on_a_machine: int
    device: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    passes: int = 0
    offloaded: int = 0
    takes_turns: bool = False

    @property
    def kept(self) -> int:
        """Bytes that are kept between passes."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Bytes on the device, without offloaded ones."""
        return self.kept + self.passes


@frozen(kw_only=True)
class Place:
    """A memory that processes share: bytes that are held at once, and bytes that there are."""

    name: str
    held: int
    available: int


def memory_plan(
    config: RLConfig,
    actor: ModelShape,
    *,
    compute_bytes: int,
    machine: Machine,
    critic: ModelShape | None = None,
    reference: ModelShape | None = None,
    reward: ModelShape | None = None,
) -> list[RoleMemory]:
    """The roles of a run.

    `compute_bytes` is the size of one number in the compute format: 2 or, for float32, 4. `critic` and
    `reference` default to the actor's shape without adapters, that of the critic in the compute format; they appear
    only where the settings use them. `reward`: of the reward model, if there is one.
    """
    rows = [_trained(config, "actor", actor, compute_bytes, machine)]
    base = evolve(actor, adapters=0)
    plain = evolve(base, quantised=0)
    if "critic" in estimator_traits(config.algo.advantage.estimator).needs:
        rows.append(_trained(config, "critic", critic or plain, compute_bytes, machine))
    compares = config.algo.kl.init_coef > 0 and config.algo.kl.against is KLAgainst.REFERENCE
    # In one process the reference is the actor without its adapters.
    if compares and (config.cluster.enable or reference is not None or not actor.adapters):
        rows.append(_reference(config, reference or base, compute_bytes))
    if reward is not None:
        rows.append(_reward(config, reward, compute_bytes))
    if config.rollout.engine is not Engine.SERVER:  # servers have memory of their own
        rows.append(_engine(config, plain, compute_bytes, machine))
    return rows


def places(rows: Sequence[RoleMemory], machine: Machine) -> Iterator[Place]:
    """Every memory that the run uses: GPUs by who shares them, and that of the machine with most processes."""
    if not machine.gpu:
        held = _at_once((row, row.on_a_machine) for row in rows)
        yield Place(name="a machine's memory", held=held, available=machine.memory)
        return
    for device in dict.fromkeys(row.device for row in rows):
        sharing = [row for row in rows if row.device == device]
        name = f"a GPU of {', '.join(row.role for row in sharing)}"
        yield Place(name=name, held=_at_once((row, 1) for row in sharing), available=machine.gpu)
    offloaded = sum(row.on_a_machine * row.offloaded for row in rows)
    if offloaded:
        yield Place(name="a machine's memory", held=offloaded, available=machine.memory)


def shortages(rows: Sequence[RoleMemory], machine: Machine) -> Iterator[str]:
    """A sentence for each place where the run does not fit."""
    for place in places(rows, machine):
        if place.held > place.available:
            yield (
                f"This may not fit: {place.name} would hold {place.held / MIB:,.0f} MiB at once, and has "
                f"{place.available / MIB:,.0f}. Lower --train.max_tokens_per_micro_batch (or, where engines share a "
                "GPU, --vllm.gpu_memory_utilization), turn on --actor.gradient_checkpointing, or divide models over "
                "more processes (--cluster.enable, --actor.num_gpus_per_node, --ds.zero_stage 3)."
            )


def _at_once(rows: Iterable[tuple[RoleMemory, int]]) -> int:
    """Bytes of so many processes of each role in one memory."""
    always, passes, turns = 0, [0], 0
    for row, count in rows:
        if row.takes_turns:
            turns += count * row.total
        elif row.role in ("engines", "reward"):  # replies are judged while others are sampled
            always += count * row.total
        else:
            always += count * row.kept
            passes.append(count * row.passes)
    return always + max(*passes, turns)


def _trained(config: RLConfig, role: str, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    """Returns the memory of actor or critic; `DeepSpeedModule` and `MasterOptimizer` keep the numbers counted here."""
    shape = _share(config, role, shape)
    where, trained, ds = _where(config, role), shape.trained, config.ds
    weights = shape.weights(compute_bytes)
    gradients = trained * FLOAT32_BYTES
    moments = ADAM_MOMENTS * trained * FLOAT32_BYTES
    masters = trained * FLOAT32_BYTES
    average = trained * FLOAT32_BYTES if role == "actor" and config.train.enable_ema else 0  # in the machine's memory
    passes = _activations(config, role, shape, compute_bytes) + shape.dequantised(compute_bytes)
    stage = ds.zero_stage if compute_bytes == FLOAT32_BYTES else max(ds.zero_stage, GRADIENTS)
    if not config.cluster.enable or stage == 0:
        optimizer = moments + (masters if compute_bytes < FLOAT32_BYTES else 0)
        row = evolve(where, weights=weights, gradients=gradients, optimizer=optimizer, passes=passes)
        return evolve(row, offloaded=average) if machine.gpu else evolve(row, optimizer=optimizer + average)
    size = where.processes // ds.tensor_parallel_size
    optimizer = math.ceil((masters + moments) / size)  # ZeRO keeps masters of float32 weights too
    passes += min(BUCKET_NUMBERS, trained) * compute_bytes
    if stage >= GRADIENTS:
        gradients = math.ceil(gradients / size)
    else:
        gradients *= 2  # DeepSpeed keeps the sum over micro-batches apart from the latest of them
    if stage == PARAMETERS:
        passes += min(GATHERED_NUMBERS * compute_bytes, weights)
        weights = math.ceil(weights / size)
    average = math.ceil(average / size)
    optimizer += 0 if machine.gpu else average
    offloaded = average if machine.gpu else 0
    if machine.gpu and ds.adam_offload:
        offloaded += optimizer + gradients
        optimizer = gradients = 0
    if machine.gpu and ds.param_offload:
        offloaded += weights
        weights = 0
    return evolve(
        where,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        passes=passes,
        offloaded=offloaded,
    )


def _reference(config: RLConfig, shape: ModelShape, compute_bytes: int) -> RoleMemory:
    """Returns the memory of the reference, which ZeRO does not divide, with one layer's activations at a time."""
    activations = shape.hidden * _activations_per_hidden(config)
    passes = math.ceil(_tokens(config, "reference") * activations * compute_bytes)
    return evolve(
        _where(config, "reference"),
        weights=_share(config, "reference", shape).weights(compute_bytes),
        passes=passes + shape.dequantised(compute_bytes),
    )


def _reward(config: RLConfig, shape: ModelShape, compute_bytes: int) -> RoleMemory:
    """Returns the memory of the reward model, which is whole in every process; a pass has whole texts."""
    longest = longest_sample(config)
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    tokens = max(longest, min(REWARD_TOKENS, samples * longest))
    return evolve(
        _where(config, "reward"),
        weights=shape.parameters * compute_bytes,
        passes=tokens * shape.hidden * ACTIVATIONS_PER_HIDDEN * compute_bytes,
    )


def _engine(config: RLConfig, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    weights = shape.parameters * compute_bytes
    overlaps = config.train.async_enable
    if config.rollout.engine is Engine.VLLM:
        width = config.vllm.gpus_per_engine
        weights = math.ceil(weights / width)
        share = int(config.vllm.gpu_memory_utilization * machine.gpu)
        return evolve(
            _where(config, "engines"),
            weights=weights,
            passes=max(0, share - weights) if machine.gpu else CPU_CACHE_BYTES,
            takes_turns=bool(machine.gpu) and config.train.colocate_all,
        )
    own = config.cluster.enable or overlaps
    return evolve(
        _where(config, "engines"),
        weights=weights if own else 0,
        passes=_kv_cache(shape, config, compute_bytes),
        takes_turns=not overlaps,
    )


def _where(config: RLConfig, role: str) -> RoleMemory:
    """Processes of a role, how many of them one machine has, and on which device they are; nothing is held yet."""
    if not config.cluster.enable:
        return RoleMemory(role=role, processes=1, on_a_machine=1, device="process")
    train, embedded = config.train, config.rollout.engine is not Engine.VLLM
    if role != "engines":
        section = "ref" if role == "reference" else role
        size = ranks(config, section)
        on_a_machine = getattr(config, section).num_gpus_per_node or config.actor.num_gpus_per_node
    elif embedded:
        size = on_a_machine = 1
    else:
        size = config.vllm.num_engines * config.vllm.gpus_per_engine
        on_a_machine = math.ceil(size / config.actor.num_nodes)
    shares = train.colocate_all or (train.colocate_actor_ref and role in ("actor", "reference"))
    device = "driver" if role == "engines" and embedded else "shared" if shares else role
    if device == "reward" and train.colocate_critic_reward:
        device = "critic"
    return RoleMemory(role=role, processes=size, on_a_machine=on_a_machine, device=device)


def _tokens(config: RLConfig, role: str) -> int:
    """Tokens that one process passes over at a time: its part of a micro-batch, whose size goes by the actor's
    processes, and at least its part of the longest sequence."""
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    longest = longest_sample(config)
    parts = _where(config, role).processes / config.ds.tensor_parallel_size
    least = math.ceil(longest / config.ds.sequence_parallel_size)
    budget = config.train.max_tokens_per_micro_batch * ranks(config) / parts
    return max(least, math.ceil(min(budget, samples * longest / parts)))


def _share(config: RLConfig, role: str, shape: ModelShape) -> ModelShape:
    """Returns a process's share of a model whose layers are divided by `adapters.models.deepspeed.tensor_parallel`: an
    input embedding is divided only as the output's, which a critic has not; norms are too small to count."""
    whole = shape.embedding if role == "critic" or not shape.tied else 0
    return evolve(shape, parameters=whole + math.ceil((shape.parameters - whole) / config.ds.tensor_parallel_size))


def _activations_per_hidden(config: RLConfig) -> float:
    divided = ACTIVATIONS_PER_HIDDEN - WHOLE_ACTIVATIONS_PER_HIDDEN
    return WHOLE_ACTIVATIONS_PER_HIDDEN + divided / config.ds.tensor_parallel_size


def _activations(config: RLConfig, role: str, shape: ModelShape, compute_bytes: int) -> int:
    checkpointing = role == "actor" and config.actor.gradient_checkpointing
    of_layer = _activations_per_hidden(config)
    kept = CHECKPOINTED_ACTIVATIONS_PER_HIDDEN if checkpointing else of_layer
    # Checkpointing recomputes one layer at a time in full.
    per_token = shape.hidden * (shape.layers * kept + (of_layer if checkpointing else 0))
    return math.ceil(_tokens(config, role) * per_token * compute_bytes)


def _kv_cache(shape: ModelShape, config: RLConfig, compute_bytes: int) -> int:
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    ahead = config.train.max_staleness + 1 if config.train.async_enable else 1
    sequences = min(config.rollout.max_batch_size, samples * ahead)
    length = longest_sample(config)
    return sequences * length * 2 * shape.layers * shape.kv_heads * shape.head_dim * compute_bytes
