"""The loss of process reward models: at the end of each step the model says by its next token whether the step is
right."""

from torch import Tensor
from torch.nn.functional import log_softmax


def step_loss(logits_KR: Tensor, labels_K: Tensor) -> Tensor:
    """Cross-entropy of each step over the reward tokens alone.

    Float labels are the probability p that the step is right, and the target is (p, 1 - p) over two reward tokens, of
    which the first stands for right (Wang et al. 2023, "Math-Shepherd", arXiv:2312.08935: its hard and
    soft estimates). Integer labels are the index of the right reward token (Lightman et al. 2023, arXiv:2305.20050).

    Args:
        logits_KR: of each of the K steps, the logits (or log-probs) of the R reward tokens.
        labels_K: as above.

    Raises:
        ValueError: float labels, but not two reward tokens.
    """
    logprobs_KR = log_softmax(logits_KR, dim=1)
    if not labels_K.is_floating_point():
        return -logprobs_KR.gather(1, labels_K[:, None])[:, 0]
    if logits_KR.shape[1] != 2:
        raise ValueError(f"Labels from 0 to 1 need two reward tokens, but there are {logits_KR.shape[1]}.")
    right_K, wrong_K = logprobs_KR.unbind(1)
    return -labels_K * right_K - (1 - labels_K) * wrong_K


def step_accuracy(logits_KR: Tensor, labels_K: Tensor) -> Tensor:
    """Whether each step's likeliest reward token is the label's, as 0 or 1; a float label stands for the first where it
    is above 1/2."""
    wanted_K = (labels_K <= 0.5).long() if labels_K.is_floating_point() else labels_K
    return (logits_KR.argmax(1) == wanted_K).to(logits_KR.dtype)
