"""Memory plan of a run, estimated from the shape of its models: arithmetic only, importable without torch.

Each number is an upper estimate of what one process of a role holds at its own peak. Does not own: what processes that
share a device hold at once (`memory_places.py`), nor who runs where (`entrypoints.cluster`).
"""

import math

from attrs import evolve

from rollgrad.application.settings.derived import divides_reward, keeps_average, longest_sample, moves_reference, ranks
from rollgrad.application.settings.engine_memory import engine_share, engines_sleep
from rollgrad.application.settings.memory_places import Machine, RoleMemory
from rollgrad.application.settings.memory_plan_passes import (
    FLOAT32_BYTES,
    embedded_bytes,
    exchanged_bytes,
    head_bytes,
    offloaded_bytes,
    repeated_bytes,
    scoring_bytes,
    training_bytes,
)
from rollgrad.application.settings.memory_plan_tokens import PassTokens, pass_tokens
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.ds import BUCKET_NUMBERS, GRADIENTS, PARAMETERS
from rollgrad.application.settings.sections.reward import REWARD_TOKENS
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import CPU_CACHE_BYTES, SyncBackend
from rollgrad.application.settings.weight_backend import BUCKET_BYTES, RECEIVED_BUCKETS, sync_backend
from rollgrad.domain.algorithms.catalogue import estimator_traits
from rollgrad.domain.algorithms.settings import KLAgainst, KLEstimator

ADAM_MOMENTS = 2

GATHERED_NUMBERS = 1_000_000_000
"""Parameters that ZeRO's last stage keeps whole at once for a pass, DeepSpeed's default."""

GRAPH_BYTES = 1536 * 2**20
"""Memory of a GPU with the steps that vLLM has captured as CUDA graphs, which it keeps while it sleeps: 1.50 GB of
Kimi-K2.6 on each of eight GPUs (vllm-project/vllm#47654)."""


def memory_plan(
    config: RLConfig,
    actor: ModelShape,
    *,
    compute_bytes: int,
    machine: Machine,
    critic: ModelShape | None = None,
    reference: ModelShape | None = None,
    reward: ModelShape | None = None,
    told: int = 0,
) -> list[RoleMemory]:
    """The roles of a run.

    Shapes whose `passes` were measured have them in the compute format. `compute_bytes` is the size of one number in
    it: 2 or, for float32, 4. `critic` and `reference` default to the actor's shape without adapters, that of the critic
    in the compute format; they appear only where the settings use them. `reward`: of the reward model, if there is one.
    `told`: tokens that the longest prompt of the reference has more than that of the policy.
    """
    row = _saved(config, _at_rest(config, "actor", actor, compute_bytes, machine), actor, machine)
    rows = [_compared(config, row, actor, compute_bytes, machine)]
    base = evolve(actor, adapters=0)
    plain = evolve(base, quantised=0)
    if "critic" in estimator_traits(config.algo.advantage.estimator).needs:
        row = _at_rest(config, "critic", critic or plain, compute_bytes, machine)
        rows.append(_saved(config, row, (critic or plain).without_head(), machine))
    compares = config.algo.kl.init_coef > 0 and config.algo.kl.against is KLAgainst.REFERENCE and not config.ref.served
    whole = config.algo.kl.estimator == KLEstimator.FULL and config.algo.kl.top_k is None
    # In one process the reference is the actor without its adapters, unless whole distributions are compared; one that
    # moves is the actor with other weights, everywhere.
    if (
        compares
        and not moves_reference(config)
        and (config.cluster.enable or reference is not None or not actor.adapters or whole)
    ):
        beside = "actor" if whole else "reference"
        rows.append(_reference(config, reference or base, compute_bytes, machine, beside=beside, told=told))
    if reward is not None:
        rows.append(_reward(config, reward, compute_bytes, machine))
    if config.rollout.engine is not Engine.SERVER:  # servers have memory of their own
        rows.append(_engine(config, plain, compute_bytes, machine))
    if not machine.gpu:
        return rows
    shapes = {"actor": actor, "critic": critic or plain, "reference": reference or base, "reward": reward or plain}
    rows = [_exchanging(config, row, plain, compute_bytes) for row in rows]
    return [_loaded(config, row, shapes.get(row.role, plain), compute_bytes) for row in rows]


def _exchanging(config: RLConfig, row: RoleMemory, shape: ModelShape, compute_bytes: int) -> RoleMemory:
    """Returns a role with the groups in which its processes exchange, and with weights on their way from the actor to
    vLLM's engines through the memory of GPUs."""
    row = evolve(row, groups=_groups(config, row))
    if config.rollout.engine is not Engine.VLLM or row.role not in ("actor", "engines"):
        return row
    bucket, way = max(BUCKET_BYTES, shape.embedding * compute_bytes), sync_backend(config, gpus=True)
    if row.role == "actor":
        # Of a bucket that an engine maps, torch frees nothing before the transfer has ended.
        row = evolve(row, buckets=bucket if way is SyncBackend.CUDA_IPC else 0)
    elif way is SyncBackend.NCCL:
        row = evolve(row, buckets=RECEIVED_BUCKETS * bucket)
    return evolve(row, groups=row.groups + 1) if way is SyncBackend.NCCL else row


def _groups(config: RLConfig, row: RoleMemory) -> int:
    """Returns in how many groups each process of a role exchanges with others, but for those of an engine that is
    awake, whose share of a GPU has them."""
    if row.role == "engines":
        vllm = config.vllm
        return (vllm.tensor_parallel_size > 1) + (vllm.pipeline_parallel_size > 1) if row.sleeps else 0
    if row.processes == 1:
        return 0
    ds, experts = config.ds, config.cluster.expert_parallel_size
    # Those that share layers, and those that have the same share of them; likewise experts.
    groups = 1 + (ds.sequence_parallel_size > 1) + (row.role in ("actor", "critic") and _copied_over(config) > 0)
    groups += sum((size > 1) + (1 < size < row.processes) for size in (ds.tensor_parallel_size, experts))
    return groups


def _trained(config: RLConfig, role: str, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    """Returns the memory of actor or critic; `DeepSpeedModule` and `MasterOptimizer` keep the numbers counted here."""
    shape = _share(config, shape if role == "actor" else shape.without_head())
    where, ds = _where(config, role), config.ds
    parts = where.processes / ds.tensor_parallel_size
    most = pass_tokens(config, shape, parts, trained=True)
    tokens = most.distinct
    head = 0 if shape.headless else head_bytes(config, shape, tokens, compute_bytes, machine.gpu, gradients=True)
    masters = shape.trained * FLOAT32_BYTES
    average = masters if role == "actor" and keeps_average(config) else 0  # in the machine's memory
    passes = training_bytes(config, shape, tokens, compute_bytes, head, machine.gpu) + shape.dequantised(compute_bytes)
    passes += exchanged_bytes(config, shape, tokens, compute_bytes, trained=True)
    passes += repeated_bytes(config, shape, most.repeated, compute_bytes, trained=True)
    # Log-probs and values before the update are of all samples, perhaps of more tokens at a time.
    before = pass_tokens(config, shape, parts, config.train.max_tokens_per_scoring_pass)
    passes = max(passes, _scoring(config, shape, before, compute_bytes, machine) + shape.dequantised(compute_bytes))
    if config.cluster.enable and config.cluster.strategy is Strategy.FSDP2:
        row = evolve(where, passes=passes + _of_fsdp2(config, shape, tokens, compute_bytes))
        return _under_fsdp2(config, row, shape, compute_bytes, average, machine)
    row = evolve(where, passes=passes)
    stage = ds.zero_stage if compute_bytes == FLOAT32_BYTES else max(ds.zero_stage, GRADIENTS)
    if config.cluster.enable and stage:
        return _under_zero(config, row, shape, compute_bytes, average, machine, stage)
    optimizer = ADAM_MOMENTS * masters + (masters if compute_bytes < FLOAT32_BYTES else 0)
    row = evolve(row, weights=shape.weights(compute_bytes), gradients=masters, optimizer=optimizer)
    return evolve(row, offloaded=average) if machine.gpu else evolve(row, optimizer=optimizer + average)


def _under_fsdp2(
    config: RLConfig, row: RoleMemory, shape: ModelShape, compute_bytes: int, average: int, machine: Machine
) -> RoleMemory:
    """Returns the memory of a process that has its share of a trained model's rows, and of its `average`."""
    size, masters = row.processes, shape.trained * FLOAT32_BYTES
    row = evolve(
        row,
        weights=math.ceil(shape.parameters * compute_bytes / size) if shape.adapters else 0,
        gradients=math.ceil(masters / size),
        optimizer=math.ceil((1 + ADAM_MOMENTS) * masters / size),  # the masters are the weights
    )
    average = math.ceil(average / size)
    if not machine.gpu:
        return evolve(row, optimizer=row.optimizer + average)
    if not config.cluster.offload:
        return evolve(row, offloaded=average)
    offloaded = row.weights + row.gradients + row.optimizer + average
    return evolve(row, weights=0, gradients=0, optimizer=0, offloaded=offloaded)


def _under_zero(
    config: RLConfig, row: RoleMemory, shape: ModelShape, compute_bytes: int, average: int, machine: Machine, stage: int
) -> RoleMemory:
    """Returns the memory of a process of a `stage` of ZeRO above 0; `average` is that of all processes."""
    ds, size = config.ds, row.processes // config.ds.tensor_parallel_size
    weights, masters = shape.weights(compute_bytes), shape.trained * FLOAT32_BYTES
    optimizer = math.ceil((1 + ADAM_MOMENTS) * masters / size)  # ZeRO keeps masters of float32 weights too
    # Below GRADIENTS DeepSpeed keeps the sum over micro-batches apart from the latest of them.
    gradients = math.ceil(masters / size) if stage >= GRADIENTS else 2 * masters
    passes, buffer, bucket = row.passes, 0, min(BUCKET_NUMBERS, shape.trained)
    if stage == PARAMETERS:
        buffer = bucket * FLOAT32_BYTES
        passes += buffer + min(GATHERED_NUMBERS * compute_bytes, weights)  # sent as float32, in another order
        copied = _copied_over(config)
        weights = math.ceil(weights / size) + (math.ceil(weights / copied) if copied else 0)
    else:
        passes += bucket * (compute_bytes + (FLOAT32_BYTES if compute_bytes < FLOAT32_BYTES else 0))
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
        row,
        weights=weights,
        gradients=gradients + buffer,
        optimizer=optimizer,
        passes=passes,
        offloaded=offloaded,
        keeps_gradients=stage == PARAMETERS,
    )


def _copied_over(config: RLConfig) -> int:
    """Returns over how many processes ZeRO's last stage divides a second copy of what is trained, from which it gathers
    weights in backward passes (hpZ; Wang et al. 2023, arXiv:2306.10209); 0 without one."""
    extra = (config.ds.extra or {}).get("zero_optimization") or {}
    over = int(extra.get("zero_hpz_partition_size", 1))
    deepspeed = config.cluster.enable and config.cluster.strategy is Strategy.DEEPSPEED
    return over if over > 1 and deepspeed and config.ds.zero_stage == PARAMETERS else 0


def _at_rest(config: RLConfig, role: str, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    """Returns the row of actor or critic with the inputs of layers that are in the machine's memory, and with the bytes
    that its optimizer leaves to engines while these sample. Under FSDP2 these are the moments, because the masters are
    the weights."""
    row = _trained(config, role, shape, compute_bytes, machine)
    if not machine.gpu:
        return row
    tokens = pass_tokens(config, shape, row.processes / config.ds.tensor_parallel_size, trained=True).distinct
    row = evolve(row, offloaded=row.offloaded + offloaded_bytes(config, shape, tokens, compute_bytes))
    if not config.train.optimizer_sleeps:
        return row
    divided = config.cluster.strategy is Strategy.FSDP2
    stepped = row.optimizer * ADAM_MOMENTS // (1 + ADAM_MOMENTS) if divided else row.optimizer
    return evolve(row, rests=stepped + (row.gradients if row.keeps_gradients else 0))


def _saved(config: RLConfig, row: RoleMemory, shape: ModelShape, machine: Machine) -> RoleMemory:
    """Returns the row of actor or critic with the copy of its state that `ckpt.async_save` makes in the machine's
    memory. Under FSDP2 each process copies its rows; elsewhere the first process copies all, which is counted in equal
    parts for all processes on its machine."""
    if not config.ckpt.async_save:
        return row
    averages = row.role == "actor" and keeps_average(config)
    state = shape.trained * (1 + ADAM_MOMENTS + averages) * FLOAT32_BYTES
    rows = config.cluster.enable and config.cluster.strategy is Strategy.FSDP2
    copy = math.ceil(state / (row.processes if rows else row.on_a_machine))
    return evolve(row, offloaded=row.offloaded + copy) if machine.gpu else evolve(row, optimizer=row.optimizer + copy)


def _compared(config: RLConfig, row: RoleMemory, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    """Returns the actor's row with the copy of the weights that its first process compares them with, in the machine's
    memory, where changes alone go to engines; each process on its machine counts as much."""
    if not (config.vllm.sync_delta or config.rollout.server_sync_delta):
        return row
    copy = math.ceil(shape.parameters * compute_bytes / row.on_a_machine)
    return evolve(row, offloaded=row.offloaded + copy) if machine.gpu else evolve(row, weights=row.weights + copy)


def _of_fsdp2(config: RLConfig, shape: ModelShape, tokens: int, compute_bytes: int) -> int:
    """Returns the bytes of what is whole in a pass: everything outside of the layers, and two layers, each with the
    experts that a process holds. To these come the gradients of all that but one layer, in the format in which they are
    computed and in the float32 in which they are summed, and twice the hidden states that are sent to experts."""
    outside = shape.embedding if shape.headless or shape.tied else 2 * shape.embedding
    elsewhere = shape.experts - shape.experts // config.cluster.expert_parallel_size
    layer = math.ceil((shape.parameters - outside - elsewhere) / shape.layers)
    gradients = 0 if shape.adapters else (outside + layer) * (compute_bytes + FLOAT32_BYTES)
    sent = tokens * shape.experts_per_token * shape.hidden
    return (outside + 2 * layer + 2 * sent) * compute_bytes + gradients


def _reference(
    config: RLConfig, shape: ModelShape, compute_bytes: int, machine: Machine, *, beside: str, told: int
) -> RoleMemory:
    """Returns the memory of the reference, with one layer's activations at a time, in the processes of the role
    `beside`; FSDP2 divides it, and ZeRO at its last stage alone, as it does the actor's parameters. Its prompts may
    have `told` tokens more."""
    where, apart = _where(config, beside), beside == "reference"  # else it is whole in each of the actor's processes
    budget = config.train.max_tokens_per_scoring_pass if apart else None
    parts, longest = where.processes / config.ds.tensor_parallel_size, longest_sample(config)
    most = pass_tokens(config, shape, parts, budget, told=told if apart else 0)
    tokens = most.distinct
    if not apart and told:  # it reads the actor's micro-batches, and samples may be told differently
        most = pass_tokens(config, evolve(shape, passes=None), parts)
        tokens = math.ceil(most.distinct * (longest + told) / longest)
    weights = (_share(config, shape) if apart else shape).weights(compute_bytes)
    passes = _scoring(config, shape, evolve(most, distinct=tokens), compute_bytes, machine)
    passes += shape.dequantised(compute_bytes)
    ds, offloaded = config.ds, 0
    fsdp2 = config.cluster.strategy is Strategy.FSDP2
    by_zero = (ds.zero_stage == PARAMETERS or config.ref.offload) and ds.tensor_parallel_size == 1
    if config.cluster.enable and apart and (fsdp2 or by_zero):
        if fsdp2:
            passes += _of_fsdp2(config, evolve(shape, adapters=1), tokens, compute_bytes)  # no gradients
        else:
            passes += min(GATHERED_NUMBERS * compute_bytes, weights)
        weights = math.ceil(weights / where.processes)
        if machine.gpu and (config.cluster.offload or ds.param_offload or config.ref.offload):
            weights, offloaded = 0, weights
    return evolve(where, role="reference", weights=weights, passes=passes, offloaded=offloaded)


def _scoring(config: RLConfig, shape: ModelShape, most: PassTokens, compute_bytes: int, machine: Machine) -> int:
    """Returns what a pass without gradients holds: its layers or, after them, the logits and what they are made of."""
    tokens = most.distinct
    last = tokens * shape.hidden * compute_bytes
    last += 0 if shape.headless else head_bytes(config, shape, tokens, compute_bytes, machine.gpu)
    layers = scoring_bytes(config, shape, tokens, compute_bytes)
    layers += exchanged_bytes(config, shape, tokens, compute_bytes)
    layers += repeated_bytes(config, shape, most.repeated, compute_bytes)
    return max(layers, last)


def _reward(config: RLConfig, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    """Returns the memory of the reward model, which its processes divide or have whole; a pass has whole texts."""
    longest = longest_sample(config)
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    tokens = max(longest, min(REWARD_TOKENS, samples * longest))
    where, shape = _where(config, "reward"), shape.without_head()
    weights, offloaded = shape.parameters * compute_bytes, 0
    passes = scoring_bytes(config, shape, tokens, compute_bytes)
    if config.cluster.enable and divides_reward(config):
        if config.cluster.strategy is Strategy.FSDP2:
            passes += _of_fsdp2(config, evolve(shape, adapters=1), tokens, compute_bytes)  # no gradients
        else:
            passes += min(GATHERED_NUMBERS * compute_bytes, weights)
        weights = math.ceil(weights / where.processes)
        if machine.gpu and (config.cluster.offload or config.ds.param_offload or config.reward.offload):
            weights, offloaded = 0, weights
    return evolve(where, weights=weights, passes=passes, offloaded=offloaded, takes_turns=not config.train.async_enable)


def _engine(config: RLConfig, shape: ModelShape, compute_bytes: int, machine: Machine) -> RoleMemory:
    weights = shape.parameters * compute_bytes
    overlaps = config.train.async_enable
    if config.rollout.engine is Engine.VLLM:
        sleeps = bool(machine.gpu) and engines_sleep(config)
        width = config.vllm.gpus_per_engine
        weights = math.ceil(weights / width)
        if config.vllm.sync_delta and not machine.gpu:
            weights *= 2  # as they were loaded, and as they are packed
        extra = config.vllm.extra or {}
        asked = extra.get("kv_cache_memory_bytes") or 0  # it overrides the engine's share
        share = int(engine_share(config) * machine.gpu) - weights
        passes = max(share, asked, 0) if machine.gpu else asked or CPU_CACHE_BYTES
        captures = not (extra.get("enforce_eager") or extra.get("sleep_mode_offload_cudagraph"))
        return evolve(
            _where(config, "engines"),
            weights=weights,
            passes=passes,
            takes_turns=sleeps,
            sleeps=sleeps,
            asleep=min(GRAPH_BYTES, passes) if sleeps and captures else 0,
        )
    own = config.cluster.enable or overlaps
    return evolve(
        _where(config, "engines"),
        weights=weights if own else 0,
        passes=embedded_bytes(config, shape, compute_bytes),
        takes_turns=not overlaps,
    )


def _loaded(config: RLConfig, row: RoleMemory, shape: ModelShape, compute_bytes: int) -> RoleMemory:
    """Returns a role with what its model needs while it is loaded; engines of vLLM load theirs piece by piece."""
    if row.role == "engines" and (config.rollout.engine is Engine.VLLM or not row.weights):
        return row
    ds, division = config.ds, config.cluster.strategy
    by_all = division is Strategy.FSDP2 or ds.zero_stage == PARAMETERS or ds.tensor_parallel_size > 1
    rests = row.role == "reference" and config.ref.offload
    by_role = {"engines": False, "reward": divides_reward(config)}
    divided = config.cluster.enable and by_role.get(row.role, by_all or rests)
    return evolve(row, loading=shape.loading(compute_bytes, row.processes if divided else 1))


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
    beside = "actor" if role == "engines" and embedded else role  # the driver and the actor take the first GPU there
    shares = train.colocate_all or (train.colocate_actor_ref and beside in ("actor", "reference"))
    device = "shared" if shares else beside
    if device == "reward" and train.colocate_critic_reward:
        device = "critic"
    return RoleMemory(role=role, processes=size, on_a_machine=on_a_machine, device=device)


def _share(config: RLConfig, shape: ModelShape) -> ModelShape:
    """Returns a process's share of a model whose layers are divided by `adapters.models.deepspeed.tensor_parallel`: an
    input embedding is divided only as the output's, which a model of values has not; norms are too small to count."""
    whole = shape.embedding if shape.headless or not shape.tied else 0
    return evolve(shape, parameters=whole + math.ceil((shape.parameters - whole) / config.ds.tensor_parallel_size))
