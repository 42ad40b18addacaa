"""How a model makes logits of hidden states, and which of them a process computes."""

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, distributed

from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.domain.errors import ConfigurationError


@frozen(kw_only=True, eq=False)
class VocabularyShare:
    """A process's rows of the output embedding: those from the `first` on. The processes of torch's `group` have all of
    them, and the same hidden states. The default is all rows."""

    first: int = 0
    group: Any = None
    _sizes: list[int] = field(init=False, factory=list)
    """The `size`, once it is known, which is asked for in each pass."""

    def rows(self, targets_A: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns rows_A, the targets' rows among this process's `count`, and mine_A, false where another process has
        the target (the row is then arbitrary)."""
        rows_A = targets_A - self.first
        return rows_A.clamp(0, count - 1), (rows_A >= 0) & (rows_A < count)

    def gathered(self, columns_KA: Tensor) -> Tensor:
        """Returns columns_PKA of all P processes."""
        if self.group is None:
            return columns_KA[None]
        rows, count = columns_KA.shape
        gathered_PKA = columns_KA.new_empty(distributed.get_world_size(self.group), rows, count)
        distributed.all_gather(list(gathered_PKA), columns_KA, group=self.group)
        return gathered_PKA

    def size(self, weight_VH: Tensor) -> int:
        """Returns the number of rows of all processes, of which this one has those of `weight_VH`."""
        if self.group is None:
            return len(weight_VH)
        if not self._sizes:
            count = torch.tensor(len(weight_VH), device=weight_VH.device)
            self.sum(count)
            self._sizes.append(int(count))
        return self._sizes[0]

    def joined(self, product_AV: Tensor, size: int) -> Tensor:
        """Returns the product with all `size` rows from those with each process's."""
        if self.group is None:
            return product_AV
        whole = product_AV.new_zeros(len(product_AV), size)
        whole[:, self.first : self.first + product_AV.shape[1]] = product_AV
        self.sum(whole)
        return whole

    def sum(self, tensor: Tensor) -> None:
        """Adds the tensors of the other processes, in place."""
        if self.group is not None:
            distributed.all_reduce(tensor, group=self.group)


WHOLE_VOCABULARY = VocabularyShare()


@frozen(kw_only=True)
class LogitForm:
    """Formula of a model's logits: scale x (hidden @ weight.T + bias), and with a `cap` c then c tanh(logits / c)
    (Bello et al. 2016, arXiv:1611.09940). `float32` computes the product in float32, whatever the weights' format
    is. Hidden states in another format, as Mamba's in float32, are rounded to that of the weights, as transformers
    does."""

    scale: float = 1.0
    cap: float | None = None
    float32: bool = False

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the float32 logits of hidden states [..., H]."""
        return self.formed(self.product(hidden, weight, bias))

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns hidden @ weight.T + bias of hidden states [..., H], in the weights' format or in float32."""
        hidden = hidden.to(weight.dtype)
        if not self.float32 or hidden.dtype == torch.float32:
            return torch.nn.functional.linear(hidden, weight, bias)
        if hidden.is_cuda:  # a product with float32 output rounds no sum, and copies no weight
            rows = hidden.reshape(-1, hidden.shape[-1])
            product = torch.mm(rows, weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
            return product if bias is None else product.add_(bias)
        return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())

    def formed(self, product: Tensor) -> Tensor:
        """Returns the float32 logits of a `product`, which may be in its memory."""
        logits = product.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Returns d logits / d (hidden @ weight.T + bias) at the result of `logits`."""
        return self.scale if self.cap is None else (1 - (logits / self.cap).square()).mul_(self.scale)


PLAIN_LOGITS = LogitForm()


def logit_form(model: Any) -> LogitForm:
    """Returns the formula of a causal language model's logits. It is found by giving known numbers to the head and the
    code after it; no layer computes anything.

    Raises:
        ConfigurationError: the formula is something else than a factor and a cap.
    """
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is None:
        raise ConfigurationError("it has no output embedding, which maps its last hidden states to logits.")
    if not hasattr(head, "bias"):
        raise ConfigurationError("its output embedding is no linear layer.")
    bodies, weight = {backbone(model), model.get_decoder()} - {model}, next(model.parameters())
    vocabulary, width = head.weight.shape
    # Three rows: numbers too small for a cap to matter, a ramp, and numbers that any cap limits.
    given_TV = torch.stack(
        [torch.full((vocabulary,), 2.0**-12), torch.linspace(-50, 50, vocabulary), torch.full((vocabulary,), 1e6)]
    ).to(weight.device)
    hidden_TH = (torch.arange(3 * width, device=weight.device) % 7 - 3.0).view(3, width)
    seen: list[Tensor] = []

    def of_head(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return given_TV[None]

    try:
        head.forward = of_head
        for body in bodies:  # OPT's calls its decoder directly
            body.forward = lambda *_, **__: _Hidden(hidden_TH[None])
        with torch.no_grad():
            found_TV = model(input_ids=torch.zeros(1, 3, dtype=torch.int64, device=weight.device)).logits[0].float()
    finally:
        for part in (*bodies, head):
            vars(part).pop("forward", None)
    if len(seen) != 1 or seen[0][0].shape != hidden_TH.shape or found_TV.shape != given_TV.shape:
        raise ConfigurationError("its logits are not one product of the last hidden states and the output embedding.")
    factor = float(seen[0][0, 0, 6]) / float(hidden_TH[0, 6])
    if not torch.allclose(seen[0][0].float(), hidden_TH * factor, rtol=1e-2) or (
        factor != 1.0 and head.bias is not None
    ):
        raise ConfigurationError("it computes something between its last hidden states and its output embedding.")
    scale, cap = float(found_TV[0, 0]) * 2**12, float(found_TV[2, 0])
    form = LogitForm(
        scale=_rounded(scale * factor),
        cap=None if cap > 0.5e6 * scale else _rounded(cap),
        float32=getattr(model, "float32_head", False),
    )
    expected_TV = given_TV * scale
    if form.cap is not None:
        expected_TV = torch.tanh(expected_TV / form.cap) * form.cap
    if not torch.allclose(found_TV, expected_TV, rtol=1e-4):
        raise ConfigurationError("its logits are neither scaled nor capped products with the output embedding.")
    return form


def _rounded(number: float) -> float:
    """Rounds away the error of measuring in float32."""
    return float(f"{number:.6g}")


class _Hidden:
    """Stand-in for the output of a model's body, of which only the last hidden states are set."""

    def __init__(self, hidden_BTH: Tensor) -> None:
        self.last_hidden_state = hidden_BTH

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Tensor:
        return self.last_hidden_state
