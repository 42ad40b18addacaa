"""The layers of transformers that hand a state from token to token, computed by the plan of a pass.

Such a layer computes each token on its own but for functions of its module: a causal convolution, and a recurrence (the
gated delta rule of Qwen3-Next, Qwen3.5 and OLMo-Hybrid, Kimi's delta attention, the scans of Mamba). Where a pass has
a plan (keyword `attention_plan`), these functions are called for rows that its `Recurrence` makes; without one they are
transformers' own. What they call, kernels for GPUs among it, stays as transformers chose it.
Does not own: which token comes after which (`recurrence.py`).
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollgrad.adapters.models.torch.layers.layer_plans import noted_plan
from rollgrad.adapters.models.torch.layers.recurrence import Recurrence
from rollgrad.domain.errors import ConfigurationError

CONVOLUTION = "conv"
"""Type of layers whose tokens interact through a convolution alone."""

RECURRENT = frozenset({"linear_attention", "hybrid", CONVOLUTION})
"""Types of layers that hand a state on; those of type hybrid attend as well."""

TOKENWISE = frozenset({"mlp", "moe"})
"""Types of layers in which tokens do not interact."""

STATE_ALONE = RECURRENT - {"hybrid"} | TOKENWISE
"""Types of layers that keep no keys."""

SHORTEST_CHUNK = 16
"""Tokens of a chunk of Mamba 2's scan at least, which kernels need."""

MOST_DECAYS = 1 << 24
"""Numbers of Mamba's states at all tokens that are computed together at most, if those of one are not more."""


def recurrent_types(model: Any) -> list[str]:
    """Returns the type of each layer of a transformers model that hands a state on."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return [kind for kind in kinds if kind in RECURRENT]


def attending_layers(text: Any) -> list[int]:
    """Returns the indices of the layers that keep keys, of a model whose text has these settings."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return [index for index, kind in enumerate(kinds) if kind not in STATE_ALONE]


def key_copies(text: Any) -> int:
    """Returns how many heads have copies of the same queries and keys in delta rules of a model whose text has these
    settings, as transformers makes them for as many values."""
    keys: int | None = getattr(text, "linear_num_key_heads", None)
    return text.linear_num_value_heads // keys if keys else 1


def check_recurrent_layers(model: Any) -> None:
    """Checks that a plan can compute the layers of a transformers model that hand a state on.

    Raises:
        ConfigurationError: it cannot.
    """
    kinds = set(recurrent_types(model))
    names = {name for module in defining_modules(model) for name in vars(module)}
    known = names & {*_RECURRENCES} if kinds - {CONVOLUTION} else names & {_CONVOLVED}
    if kinds and not known:
        raise ConfigurationError(
            f"it has layers of type {', '.join(sorted(kinds))}, whose recurrence packed training does not know."
        )


def install_recurrence(model: Any) -> None:
    """Has the layers of a transformers model that hand a state on computed by the plan of a pass, where it has one."""
    if not recurrent_types(model):
        return
    for module in defining_modules(model):
        for name, planned in ({_CONVOLVED: _convolved} | _RECURRENCES).items():
            own = vars(module).get(name)
            if own is not None and not isinstance(own, _Planned):
                setattr(module, name, _Planned(own, planned, module))
    for part in model.modules():
        conv = getattr(part, "conv", None)
        hooked = _plan_as_seq_idx in part._forward_pre_hooks.values()
        # LFM2 hands this keyword alone on to its convolution.
        if not hooked and isinstance(conv, nn.Module) and "seq_idx" in inspect.signature(conv.forward).parameters:
            part.register_forward_pre_hook(_plan_as_seq_idx, with_kwargs=True)


def scans_without_plan(model: Any) -> bool:
    """Returns whether a transformers model has Mamba's scan, to which no code hands keywords on."""
    return any(_MAMBA_SCAN in vars(module) for module in defining_modules(model))


def check_planned(model: Any, calls: int) -> None:
    """Checks that a pass called its plan as often as the layers that hand a state on need.

    Raises:
        ConfigurationError: it did not.
    """
    config = model.config.get_text_config()
    scans = config.n_mamba_heads if config.model_type == "zamba" else 1  # Zamba scans head by head
    expected = sum(1 if kind == CONVOLUTION else 1 + scans for kind in recurrent_types(model))
    if calls != expected:
        raise ConfigurationError(
            "its code does not hand keywords on to all layers that hand a state on, which packed training needs."
        )


def defining_modules(model: Any) -> list[ModuleType]:
    """Returns the modules of transformers that define the parts of a model."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


class _Planned:
    """A function of a module of transformers, which the plan of a pass computes where it has one."""

    def __init__(self, own: Callable[..., Any], planned: Callable[..., Any], module: ModuleType) -> None:
        self._own, self._module = own, module
        self._planned = torch.compiler.disable(planned)  # type: ignore[no-untyped-call]

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Returns what transformers' own function does, over the rows of the plan."""
        given = named.pop("attention_plan", None)
        if given is None and isinstance(named.get("seq_idx"), _HandedOn):
            given = named.pop("seq_idx").plan
        given = noted_plan() if given is None else given
        if given is None:
            return self._own(*positional, **named)
        return self._planned(given.recurrence, self._own, self._module, *positional, **named)


def _convolved(
    recurrence: Recurrence,
    own: Callable[..., Tensor],
    module: ModuleType,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    return recurrence.convolve(
        lambda rows: own(rows, weight=weight, bias=bias, activation=activation), x, weight.shape[-1]
    )


def _delta_rule(step_name: str) -> Callable[..., Any]:
    """Returns the plan's form of a delta rule, which another function computes in steps of decoding."""

    def planned(
        recurrence: Recurrence,
        own: Callable[..., Any],
        module: ModuleType,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool,
        **_: Any,
    ) -> tuple[Tensor, None]:
        step = vars(module)[step_name]

        def scan(rows: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
            v, decay, rate, *keys = rows
            q, k = (x if x.shape[2] == v.shape[2] else x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in keys)
            result: tuple[Tensor, Tensor] = (step if recurrence.stepping else own)(
                q,
                k,
                v,
                g=decay,
                beta=rate,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            return result

        # Since transformers 5.24 queries and keys come without copies.
        copies = recurrence.key_copies if query.shape[2] == value.shape[2] else 1
        keys = (x[:, :, ::copies] for x in (query, key))
        return recurrence.scan(scan, [value, g, beta, *keys]), None

    return planned


def _mamba_2(
    recurrence: Recurrence,
    own: Callable[..., Any],
    module: ModuleType,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    chunk_size: int,
    dt_bias: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    initial_states: None,
    **named: Any,
) -> Tensor:
    # A time step of 0 leaves the state as it is, but its softplus never is 0, nor need its limit be.
    step = dt.float() + dt_bias.float()
    step = (functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    A, D = (recurrence.of_heads(each) for each in (A, D))

    def scan(rows: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, step, B, C = rows
        result: tuple[Tensor, Tensor] = own(
            x,
            step,
            A,
            B,
            C,
            D=D,
            chunk_size=min(chunk_size, max(SHORTEST_CHUNK, 1 << (x.shape[1] - 1).bit_length())),
            initial_states=state,
            return_final_states=True,
            **named,
        )
        return result

    return recurrence.scan(scan, [x, step, B, C])


def _mamba_1(
    recurrence: Recurrence,
    own: Callable[..., Any],
    module: ModuleType,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    return_last_state: bool,
    **named: Any,
) -> Tensor:
    """Mamba's scan of x [B, C, T] begins without a state, but its result is linear in one: a state h adds C exp(A (dt_1
    + ... + dt_t)) h to token t, because each token leaves exp(dt A) h of it (Gu & Dao 2023, arXiv:2312.00752, equations
    2 and 4)."""
    # A time step of 0 leaves the state as it is, but its softplus never is 0.
    step = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
    step = (functional.softplus(step) if delta_softplus else step).to(dt.dtype)
    A = recurrence.of_heads(A)

    def scan(rows: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, step, B, C = (each.transpose(1, 2) for each in (*rows[:2], *(shared[:, :, 0] for shared in rows[2:])))
        out, after = _scanned(partial(own, **named), x, step, A, B, C)
        if state is not None:
            passed = step.float().cumsum(2)
            out = out + _of_state(passed, A, C.float(), state)
            after = after + torch.exp(A * passed[:, :, -1:]) * state
        return out.transpose(1, 2), after

    # Each channel is a head of its own; all share B and C.
    columns = [*(each.transpose(1, 2) for each in (x, step)), *(each.transpose(1, 2)[:, :, None] for each in (B, C))]
    out = recurrence.scan(scan, columns).transpose(1, 2)
    return (out + x * D[:, None]) * functional.silu(z)


def _scanned(
    own: Callable[..., tuple[Tensor, Tensor]],
    x_RCT: Tensor,
    step_RCT: Tensor,
    A_CN: Tensor,
    B_RNT: Tensor,
    C_RNT: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the results of Mamba's scan [R, C, T] and the states after it [R, C, N], both with gradients.

    mamba_ssm's kernel computes no gradient of the states, but one of its results. So N tokens more are scanned, whose
    time steps of 0 leave the states as they are: the result of the n-th is the n-th number of the states.
    """
    if not torch.is_grad_enabled():
        return own(x_RCT, step_RCT, A_CN, B_RNT, C_RNT, return_last_state=True)
    tokens, numbers = C_RNT.shape[2], A_CN.shape[1]
    x, step, B = (functional.pad(each, (0, numbers)) for each in (x_RCT, step_RCT, B_RNT))
    reading_RNN = torch.eye(numbers, dtype=C_RNT.dtype, device=C_RNT.device).expand(len(C_RNT), -1, -1)
    out, after_RCN = own(x, step, A_CN, B, torch.cat([C_RNT, reading_RNN], 2), return_last_state=True)
    out_RCT, read_RCN = torch.split(out, [tokens, numbers], 2)
    # Results are rounded to the weights' number format, states are not.
    return out_RCT, after_RCN.detach() + (read_RCN - read_RCN.detach())


def _of_state(passed_RCT: Tensor, A_CN: Tensor, C_RNT: Tensor, state_RCN: Tensor) -> Tensor:
    """Returns what the states before rows add to them [R, C, T], some of each state's N numbers at a time; the backward
    pass computes it again."""
    count = max(1, MOST_DECAYS // passed_RCT.numel())

    def some(*given: Tensor) -> Tensor:
        passed_RCT, A_CN, C_RNT, state_RCN = given
        left_RCTN = torch.exp(passed_RCT[..., None] * A_CN[:, None]) * state_RCN[:, :, None]
        return torch.einsum("rctn,rnt->rct", left_RCTN, C_RNT)

    parts = zip(
        torch.split(A_CN, count, 1), torch.split(C_RNT, count, 1), torch.split(state_RCN, count, 2), strict=True
    )
    again = partial(checkpoint, some, passed_RCT, use_reentrant=False, preserve_rng_state=False)
    added: Tensor = reduce(torch.add, (again(*part) for part in parts))
    return added


def _unfused(*_: Any, **__: Any) -> None:
    """Answers as transformers does where there is no kernel for convolution and scan together."""


class _HandedOn:
    """A plan under the name of another keyword."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


def _plan_as_seq_idx(module: nn.Module, positional: Any, named: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    plan = named.get("attention_plan")
    return None if plan is None else (positional, {**named, "seq_idx": _HandedOn(plan)})


_CONVOLVED = "causal_conv1d_fn"
_MAMBA_SCAN = "mamba_selective_scan"
_RECURRENCES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule("torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta_rule("recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": _mamba_2,
    _MAMBA_SCAN: _mamba_1,
    "mamba_inner_fn": _unfused,
    "mamba2_split_conv1d_scan_combined": _unfused,
}
"""The plan's form of each function of transformers, by its name."""
