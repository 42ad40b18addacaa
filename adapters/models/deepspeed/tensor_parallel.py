"""Layers divided over neighbouring processes by DeepSpeed's AutoTP (tensor parallelism; Shoeybi et al. 2019,
"Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv:1909.08053).

Attention is divided by key/value heads, each with its query heads, and feed-forward layers by inner features, following
the plan in transformers' model; the output embedding, tied or not, by rows of the vocabulary. The rest (norms, an
untied input embedding) is equal in each process.

Invariants: all processes of a group compute the same results from the same batch. Outside this module weights and
AdamW's moments are whole.
Does not own: ZeRO, which divides each process's share over the groups (`module.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rollgrad.adapters.models.deepspeed.settings import NEVER, number_format
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.heads.logits import VocabularyShare
from rollgrad.adapters.models.torch.layers.padded import require_packed
from rollgrad.adapters.models.torch.layers.recurrent_layers import recurrent_types
from rollgrad.adapters.models.torch.loading.weight_shards import layer_parts, make_whole
from rollgrad.domain.errors import ConfigurationError


def divided(module: nn.Module, *, size: int) -> Callable[..., Any]:
    """Returns a callable for the forward pass of a module that is not trained, whose layers `initialize` divides."""
    if size == 1:
        return module
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": NEVER, **number_format(next(module.parameters()))}
    make_rest_whole(module)
    module.requires_grad_(True)  # AutoTP registers gradient hooks, and fails without gradients
    engine: Callable[..., Any] = initialize(module, config, size=size)
    module.requires_grad_(False)
    return engine


def initialize(module: Any, config: dict[str, Any], *, size: int, optimizer: Any = None) -> Any:
    """Returns DeepSpeed's engine for a `PackedLM` or `PackedValue`, whose layers are divided in place over each group
    of `size` neighbouring processes.

    All models of a process must have the same `size`, unless it is 1.

    Raises:
        ConfigurationError: the model cannot be divided so.
    """
    import deepspeed

    if size > 1:
        _require_divisible(module.model, size)
        module.config = module.model.config  # AutoTP looks here for the plan and the number of heads
        module.loss_function = None  # AutoTP sets a loss there, which is never called
        config = config | {
            "tensor_parallel": {"autotp_size": size, "vocab_parallel_lm_head": isinstance(module, PackedLM)}
        }
    with _whole_when_divided() if size > 1 else nullcontext():
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    if size > 1:
        engine.first_dataloader_check.remove()  # it can compare only tensors and lists
        if isinstance(module, PackedLM):
            head = module.model.get_output_embeddings()
            module.scorer.vocabulary = VocabularyShare(first=head.vocab_start_index, group=head.mp_group)
    return engine


def make_rest_whole(module: nn.Module) -> None:
    """Puts together what this process has loaded a share of, but for the linear layers, which `initialize` puts
    together one after the other."""
    make_whole(module, but={part for part in layer_parts(module) if isinstance(part, nn.Linear)})


@contextmanager
def _whole_when_divided() -> Iterator[None]:
    """Makes AutoTP put a linear layer together, of which this process has loaded a share, only when it divides that
    layer: until then it is a share of all processes, afterwards one of the group."""
    from deepspeed.module_inject.auto_tp import AutoTP

    dividing = {name: getattr(AutoTP, name) for name in ("_replace", "_replace_with_config")}

    def whole_first(divide: Callable[..., Any]) -> Callable[..., Any]:
        def made_whole(self: Any, child: nn.Module, *arguments: Any) -> Any:
            make_whole(child)
            return divide(self, child, *arguments)

        return made_whole

    try:
        for name, divide in dividing.items():
            setattr(AutoTP, name, whole_first(divide))
        yield
    finally:
        for name, divide in dividing.items():
            setattr(AutoTP, name, divide)


def is_divided(parameter: Tensor) -> bool:
    """Returns whether a process has only a share of the parameter."""
    return hasattr(parameter, "gather_params")


def whole(parameter: Any, share: Tensor) -> Tensor:
    """Returns a whole tensor from its `share`s in the processes of the group, which are divided like `parameter`."""
    if not is_divided(parameter):
        return share
    tensor = share.detach()
    parameter.gather_params([tensor])  # sets its data
    return tensor


def share(parameter: Any, tensor: Tensor) -> Tensor:
    """Returns this process's share of a whole tensor, the inverse of `whole`."""
    if not is_divided(parameter):
        return tensor
    part = tensor.detach()
    parameter._tp_partition([part])
    return part


@contextmanager
def gathered(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gathers the parameters inside the block, for reading only."""
    shares = [(parameter, parameter.data) for parameter in parameters if is_divided(parameter)]
    try:
        for parameter, data in shares:
            parameter.data = whole(parameter, data)
        yield
    finally:
        for parameter, data in shares:
            parameter.data = data  # ZeRO's own memory, which a copy of the same values is not


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Returns the norm of all gradients: shares of a gradient are all counted, gradients equal in all processes
    once."""
    gradients = [
        [p.grad for p in parameters if p.grad is not None and is_divided(p) == there] for there in (True, False)
    ]
    nothing = torch.zeros((), device=parameters[0].device)  # NCCL takes numbers of a GPU alone
    of_shares, alike = (nn.utils.get_total_norm(some) if some else nothing for some in gradients)
    if any(map(is_divided, parameters)):
        from deepspeed.utils import groups

        of_shares = of_shares.square()
        distributed.all_reduce(of_shares, group=groups.get_tensor_model_parallel_group())
        of_shares = of_shares.sqrt()
    return math.hypot(float(of_shares), float(alike))


def _require_divisible(model: Any, size: int) -> None:
    from deepspeed.module_inject.layers import VocabParallelEmbedding
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    require_packed(model, "ds.tensor_parallel_size", size)
    if recurrent_types(model):
        raise ConfigurationError(
            f"ds.tensor_parallel_size is {size}, but {type(model).__name__} hands a state from token to token, in "
            "layers that DeepSpeed does not divide: leave --ds.tensor_parallel_size out."
        )
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads < size:
        raise ConfigurationError(
            f"ds.tensor_parallel_size is {size}, but the model has {heads} key/value heads, and every process needs "
            f"one: set --ds.tensor_parallel_size to {heads} at most."
        )
    plan, reason = None, "transformers has no plan for it"
    try:
        plan = TPPlanConverter.convert(model.config.base_model_tp_plan)
    except ValueError as error:
        styles, _, _ = str(error).partition(". ")
        reason = f"in transformers' plan DeepSpeed does not know the style {styles.rpartition(': ')[2]}"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        plan, reason = None, "its heads have sinks, which DeepSpeed does not divide with them"
    try:
        VocabParallelEmbedding.validate_embedding(model.get_input_embeddings())
    except NotImplementedError:
        plan, reason = None, "its embedding does more than look rows up, which DeepSpeed does not divide"
    if not plan:
        raise ConfigurationError(
            f"ds.tensor_parallel_size is {size}, but {type(model).__name__} cannot be divided so ({reason}): leave "
            "--ds.tensor_parallel_size out, or choose another --actor.model_name_or_path."
        )
