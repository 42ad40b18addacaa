"""A reward model: one number for a whole text, from the last token of a sequence classifier.

Invariants: a text's score depends on the text and its images alone, not on its neighbours. Texts are padded on the
right, where a causal model does not look; those of a model that sees images are packed as in training. The score is
read at the last token of the text. Does not own: what is read of a text (`reward_text.py`), nor training.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from rollgrad.adapters.checkpoints.weight_files import tensor_shapes
from rollgrad.adapters.models.torch.allocator import keep_freed_memory
from rollgrad.adapters.models.torch.forward import action_hidden
from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.layers.classifier import is_vision_language
from rollgrad.adapters.models.torch.layers.padded import use_exact_attention
from rollgrad.adapters.models.torch.layers.sequence_parallel import sequence_group
from rollgrad.adapters.models.torch.loading.compatibility import usable_positions
from rollgrad.adapters.models.torch.loading.image_check import Renderer, check_images, small_image
from rollgrad.adapters.models.torch.loading.loading import load_critic, load_tokenizer, loaded_from
from rollgrad.adapters.models.torch.loading.weight_shards import Shard, make_whole, sharded_loading, whole_layers
from rollgrad.adapters.models.torch.rewards.reward_text import (
    EncodedText,
    begun,
    encode,
    ended,
    same_vocabulary,
    shortened,
)
from rollgrad.adapters.models.torch.rewards.together import Divide, PassesTogether
from rollgrad.application.settings.sections.reward import REWARD_TOKENS
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import CheckpointError, ConfigurationError
from rollgrad.domain.ports.chat_codec import SeesImages

log = structlog.get_logger(__name__)

SEVERAL = "the head gives several numbers"
"""Why a classifier of several labels is no reward model."""


class RewardModel:
    """Scores texts, with images in them where the model sees any, with a `*ForSequenceClassification` of one label.

    A text is a conversation as the model's template renders it; special tokens in it are real. Only the
    beginning-of-sequence token is added, if the tokenizer does so; line breaks after a special token at the end are
    left out. OpenRLHF's server, in contrast, adds the tokenizer's end-of-sequence token to every text.

    Args:
        model: in eval mode; its head `score` maps hidden states to one number. With a `head` of its own it is a causal
            language model with packed attention installed, which may see images.
        tokenizer: tokenizer of the model; its padding side does not matter.
        policy_tokenizer: of the model whose replies are judged: if it has the same vocabulary, the sampled tokens are
            scored, else their text.
        max_length: largest number of tokens of a text, added ones included; None: the model's positions. A longer text
            loses its beginning (but not the beginning-of-sequence token), because the reply is at the end.
        batch_tokens: tokens of a forward pass, padding included; a longer text has one of its own.
        moments: mean and standard deviation that scores are centred and scaled by; None leaves them as they are.
        divide: divides the model over processes, all of which then score at the same time.
        head: maps hidden states to one number; None: the model's `score`.
        images: renders images for the model; None: texts have none.
        codec: renders texts with images of which nobody knows the tokens.

    Raises:
        ConfigurationError: max_length or batch_tokens is too small, or max_length beyond the model's positions.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        policy_tokenizer: Any = None,
        max_length: int | None = None,
        batch_tokens: int = REWARD_TOKENS,
        moments: tuple[float, float] | None = None,
        divide: Divide | None = None,
        head: nn.Module | None = None,
        images: Renderer | None = None,
        codec: SeesImages | None = None,
    ) -> None:
        positions = usable_positions(model.config) or sys.maxsize
        if max_length is not None and not 2 <= max_length <= positions:
            raise ConfigurationError(
                f"--max_length is {max_length}, but must be between 2 and the model's {positions} positions: correct "
                "it, or leave it out."
            )
        if batch_tokens < 1:
            raise ConfigurationError(f"--batch_tokens is {batch_tokens}, but must be at least 1: raise it.")
        # In half precision different scores would round to ties: DeepSpeed would bring it there again.
        self._head = (model.score if head is None else head).float()
        self._tokenizer = tokenizer
        self._max_length = max_length or positions
        self._batch_tokens = batch_tokens
        shared = policy_tokenizer is not None and same_vocabulary(policy_tokenizer, tokenizer)
        self._rows = model.get_input_embeddings().weight.shape[0] if shared else 0
        """Token ids of the policy below this number are those of the model."""
        self._mean, self._std = moments or (0.0, 1.0)
        self._device: torch.device = next(model.parameters()).device
        self._images, self._codec = images, codec
        # Processes that divide what images go through must all compute it in a pass, or none.
        self._filler = None if images is None or divide is None else _smallest(images)
        self._packed = head is not None
        frozen_body = backbone(model).requires_grad_(False)
        self._passes = PassesTogether(_PackedLast(frozen_body) if self._packed else _LastHidden(frozen_body), divide)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        flag: str,
        policy_tokenizer: Any = None,
        max_length: int | None = None,
        batch_tokens: int = REWARD_TOKENS,
        normalize: bool = False,
        normalize_flag: str = "--reward.normalize model",
        shard: Shard | None = None,
        divide: Divide | None = None,
        images: Renderer | None = None,
        codec: SeesImages | None = None,
    ) -> "RewardModel":
        """Returns the model of a hub name or directory, which `flag` names. With `normalize`, which `normalize_flag`
        turns on, scores are centred and scaled by the `mean` and `std` in its config.json, where OpenRLHF's training of
        reward models writes them. `images` and `codec` render the images that texts have.

        Raises:
            CheckpointError: there is no such model, or it has no scalar head.
            ConfigurationError: its config.json lacks `mean` or `std`, a setting is one that the class refuses, or its
                images are not computed as its own code does.
        """
        from transformers import AutoConfig

        of_model: dict[str, Any] = {"dtype": dtype, "device": device, "flag": flag, "shard": shard}
        if is_vision_language(loaded_from(AutoConfig, name_or_path, flag)):
            model, head = _load_seeing(name_or_path, images, **of_model)
        else:
            model, head = _load_classifier(name_or_path, **of_model), None
        moments = _moments(model.config, name_or_path, normalize_flag, wanted=normalize)
        return cls(
            model,
            load_tokenizer(name_or_path, flag=flag),
            policy_tokenizer=policy_tokenizer,
            max_length=max_length,
            batch_tokens=batch_tokens,
            moments=moments,
            divide=divide,
            head=head,
            images=images,
            codec=codec,
        )

    def encode(self, text: str) -> EncodedText:
        """Returns the tokens that the model reads of a text; only one thread may call it at a time."""
        return encode(text, self._tokenizer, self._max_length)

    def score(self, texts: Sequence[str]) -> list[float]:
        """Returns one number for each text, in order; it may be NaN or infinite.

        Raises:
            ValueError: a text has no tokens.
        """
        return self.score_encoded([self.encode(text) for text in texts])

    @torch.no_grad()
    def judge(self, replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        """Returns the scores of the policy's replies, each with whether the beginning of its text was left out."""
        with self._together():
            encoded = [self.encode_reply(reply) for reply in replies]
            scores = self._scores(encoded)
        return [(score, text.truncated) for score, text in zip(scores, encoded, strict=True)]

    def encode_reply(self, reply: RewardInput) -> EncodedText:
        """Returns the tokens that the model reads of a reply: its own if the vocabularies agree, else those of its
        text."""
        tokens, bos = reply.token_ids, self._tokenizer.bos_token_id
        if tokens and max(tokens) < self._rows:
            return shortened(tokens, bos, self._max_length, reply.images)
        if not reply.images or self._images is None or self._codec is None:
            return self.encode(reply.text)
        files = [placed.image.data for placed in reply.images]
        # The prompt's marks are the first; one that the answer spells out stands for no image.
        pieces = ended(reply.text, self._tokenizer).split(self._images.mark)
        text = self._images.mark.join(pieces[: len(files) + 1]) + "".join(pieces[len(files) + 1 :])
        found = self._codec.marked(text, files)
        return begun(found.token_ids, found.images, self._tokenizer, self._max_length)

    @torch.no_grad()
    def score_encoded(self, texts: Sequence[EncodedText]) -> list[float]:
        """Scores texts that `encode` has encoded."""
        with self._together():
            return self._scores(texts)

    def _together(self) -> AbstractContextManager[None]:
        """Returns a block in which an error leaves no process waiting that divides the model."""
        return self._passes.made_by_all(*self._inputs([EncodedText((0,), truncated=False)]))

    def _scores(self, texts: Sequence[EncodedText]) -> list[float]:
        if not all(text.tokens for text in texts):
            raise ValueError("A text without tokens cannot be scored.")
        scores = [0.0] * len(texts)
        for batch in self._batches(texts):
            last_SH = self._passes(*self._inputs([texts[i] for i in batch]))[: len(batch)]
            for index, score in zip(batch, self._head(last_SH.float())[:, 0].tolist(), strict=True):
                scores[index] = (score - self._mean) / self._std
        return scores

    def _batches(self, texts: Sequence[EncodedText]) -> Iterator[list[int]]:
        """Yields the indices of texts of similar length, longest first, so that a lack of memory shows
        at once."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens), reverse=True)
        while order:
            count = max(1, self._batch_tokens // len(texts[order[0]].tokens))
            yield order[:count]
            order = order[count:]

    def _inputs(self, texts: Sequence[EncodedText]) -> tuple[Any, ...]:
        """Returns the arguments of a pass over texts."""
        if not self._packed:
            return self._padded([text.tokens for text in texts])
        if self._filler is not None and not any(text.images for text in texts):
            texts = [*texts, self._filler]
        return (_packed(texts),)

    def _padded(self, rows: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens_ST, padded, mask_ST and lengths_S."""
        lengths_S = torch.tensor([len(row) for row in rows])
        width = int(lengths_S.max())
        # Padding is masked and after the text, so any token serves.
        tokens_ST = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])
        mask_ST = (torch.arange(width) < lengths_S[:, None]).long()
        return tokens_ST.to(self._device), mask_ST.to(self._device), lengths_S.to(self._device)


def check_head(name_or_path: str, *, flag: str) -> None:
    """Checks by the names and shapes of its weights alone that a reward model in a directory has a head of one number.
    What is on the hub, or in another format than safetensors, passes.

    Raises:
        CheckpointError: it has none.
    """
    shapes = tensor_shapes(Path(name_or_path).expanduser())
    heads = [shape for name, shape in shapes.items() if name.endswith("score.weight")]
    if shapes and not heads:
        raise _not_scalar(flag, name_or_path, "its weights lack score.weight")
    if any(shape[0] != 1 for shape in heads):
        raise _not_scalar(flag, name_or_path, SEVERAL)


def _load_classifier(
    name_or_path: str, *, dtype: torch.dtype, device: torch.device, flag: str, shard: Shard | None
) -> Any:
    """Returns a model of text with its head `score`."""
    from transformers import AutoModelForSequenceClassification

    if device.type == "cpu" and shard is None:
        keep_freed_memory()
    try:
        with sharded_loading(shard):
            model, info = loaded_from(
                AutoModelForSequenceClassification,
                name_or_path,
                flag,
                dtype=dtype,
                num_labels=1,
                output_loading_info=True,
            )
    except CheckpointError as error:
        if not isinstance(error.__cause__, RuntimeError):  # transformers: a tensor has another shape
            raise
        raise _not_scalar(flag, name_or_path, SEVERAL) from error
    if not hasattr(model, "score"):
        raise _not_scalar(flag, name_or_path, f"{type(model).__name__} has no head `score` at the last token")
    if info["missing_keys"]:
        raise _not_scalar(flag, name_or_path, f"its weights lack {', '.join(sorted(info['missing_keys']))}")
    if unread := sorted(key for key in info["unexpected_keys"] if key.startswith("score.")):
        raise _not_scalar(flag, name_or_path, f"its head has {', '.join(unread)} besides, which nothing would read")
    model = model.to(device).eval()
    with whole_layers(model):
        use_exact_attention(model)
    make_whole(model.score)  # it is never divided: of its single row, one process would have all
    return model


def _load_seeing(name_or_path: str, images: Renderer | None, **settings: Any) -> tuple[Any, nn.Module]:
    """Returns a model that sees images, packed, and its head; `images` are rendered for it."""
    model, weights = load_critic(name_or_path, **settings)
    if weights.keys() != {"weight"}:  # a critic's has a bias
        raise _not_scalar(settings["flag"], name_or_path, "its weights lack score.weight")
    if images is not None:
        check_images(model, images, name_or_path, settings["flag"])
    head = nn.Linear(weights["weight"].shape[1], 1, bias=False)
    head.load_state_dict(weights)
    return model, head.to(settings["device"])


class _LastHidden(nn.Module):
    """The hidden state at the last token of each text [S, H]."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens_ST: Tensor, mask_ST: Tensor, lengths_S: Tensor) -> Tensor:
        output = self.body(input_ids=tokens_ST, attention_mask=mask_ST, use_cache=False)
        last_SH: Tensor = output.last_hidden_state[torch.arange(len(lengths_S), device=lengths_S.device), lengths_S - 1]
        return last_SH


class _PackedLast(nn.Module):
    """The hidden state at each action token of a packed batch [A, H]."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self._group = sequence_group(body)

    def forward(self, batch: PackedBatch) -> Tensor:
        return action_hidden(self.body, batch, self._group, back=0).hidden_BH


def _smallest(renderer: Renderer) -> EncodedText:
    """Returns a text with a small image."""
    tokens, images = renderer.sequence(renderer.mark, small_image())
    return EncodedText(tokens, truncated=False, images=images)


def _packed(texts: Sequence[EncodedText]) -> PackedBatch:
    """Returns texts end to end, of whose tokens the last are actions. They are of one group, so that what they begin
    with alike, images too, is computed once."""
    lengths_S = torch.tensor([len(text.tokens) for text in texts])
    ends_S = lengths_S.cumsum(0)
    tokens_N = torch.tensor([token for text in texts for token in text.tokens])
    return PackedBatch(
        tokens_N=tokens_N,
        action_mask_N=torch.zeros(len(tokens_N), dtype=torch.bool).index_fill(0, ends_S - 1, True),
        lengths_S=lengths_S,
        prompt_lengths_S=lengths_S,
        group_ids_S=torch.zeros_like(lengths_S),
        images_S=tuple(text.images for text in texts) if any(text.images for text in texts) else (),
    )


def _moments(config: Any, name_or_path: str, flag: str, *, wanted: bool) -> tuple[float, float] | None:
    """Returns the mean and standard deviation in a reward model's config.json, if they are wanted."""
    pair: tuple[Any, Any] = getattr(config, "mean", None), getattr(config, "std", None)
    usable = all(isinstance(number, int | float) and math.isfinite(number) for number in pair) and pair[1] > 0
    if wanted and not usable:
        raise ConfigurationError(
            f"{flag} is set, but config.json of {name_or_path!r} has mean {pair[0]} and std {pair[1]}, not two numbers "
            f"with a std above 0: leave {flag} out, or name a model that has them, as train rm writes "
            "with --eval.dataset."
        )
    if usable and not wanted:
        log.warning("mean and std of the reward model are not used", mean=pair[0], std=pair[1], to_use_them=flag)
    return pair if wanted else None


def _not_scalar(flag: str, name_or_path: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{flag} is {name_or_path!r}, which is no reward model ({reason}): name a sequence classifier with one label, "
        "or judge with this one in a function (--reward.function_path) or a server (--reward.remote_url) of your own."
    )
