"""How a model makes logits of hidden states, and which of them a process computes."""

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, distributed


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
