"""The section `ds`: how models are divided over their processes."""

from attrs import define, evolve

from rollgrad.application.settings.sections.cluster import BY_DEEPSPEED, IN_CLUSTER, Strategy
from rollgrad.domain.settings import COUNT, FREE, Condition, Range, setting

GRADIENTS = 2
"""The stage of ZeRO that divides gradients too: in 16 bits the least that DeepSpeed carries out alike."""


PARAMETERS = 3
"""The stage of ZeRO that divides parameters too."""


BUCKET_NUMBERS = 500_000_000
"""Gradients that are sent together, DeepSpeed's default."""

DIVIDES_PARAMETERS = Condition(
    lambda here, run: here.zero_stage == PARAMETERS,
    "ds.zero_stage {here.zero_stage} does not divide parameters",
    f"set --ds.zero_stage {PARAMETERS}",
)

DIVIDES_AS_IT_SAYS = evolve(
    BY_DEEPSPEED,
    holds=lambda here, run: run.cluster.strategy is Strategy.DEEPSPEED or here.zero_stage == PARAMETERS,
)
"""Condition of the stage: FSDP2 divides what stage 3 does."""


@define(kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's ZeRO: what is divided over the processes of a model."""

    zero_stage: int = setting(
        2,
        "0 divides nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too, as FSDP2 does; in 16 bits, 0 "
        "and 1 are 2.",
        Range(lambda stage: 0 <= stage <= 3, "0, 1, 2 or 3"),
        only_if=(IN_CLUSTER, DIVIDES_AS_IT_SAYS),
    )
    adam_offload: bool = setting(
        False, "Keep the optimizer's state in the CPU's memory, and step there.", only_if=(IN_CLUSTER, BY_DEEPSPEED)
    )
    param_offload: bool = setting(
        False,
        "Keep parameters in the CPU's memory; zero_stage 3 only.",
        only_if=(IN_CLUSTER, BY_DEEPSPEED, DIVIDES_PARAMETERS),
    )
    sequence_parallel_size: int = setting(
        1,
        "Processes that share each forward and backward pass, dividing its tokens and, in the attention, its heads "
        "(Ulysses) and beyond them its queries (context parallelism): for sequences that do not fit into one process. "
        "Divides the processes of every model, and the heads of layers that hand a state on.",
        COUNT,
        only_if=IN_CLUSTER,
    )
    tensor_parallel_size: int = setting(
        1,
        "Processes that share each layer, dividing its weights (AutoTP): for models whose layers do not fit into one "
        "process, or whose passes are to be faster. Divides the processes of every model; at most its key/value "
        "heads.",
        COUNT,
        only_if=(IN_CLUSTER, BY_DEEPSPEED),
    )
    extra: FREE = setting(
        None,
        "Further keys of DeepSpeed's configuration, for all models that are trained: "
        "--ds.extra.zero_optimization.overlap_comm true. Values are YAML. Those that other settings set are refused, "
        "as are names that DeepSpeed does not read.",
        only_if=(IN_CLUSTER, BY_DEEPSPEED),
    )
