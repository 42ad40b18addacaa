"""Teachers and references behind servers: log-probs at each place of token ids, by vLLM's `prompt_logprobs`.

Invariant: token ids go in and out; no text that is scored is tokenised by a server.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.engines.vllm_server.client import ServerClient
from rollgrad.application.foreign import foreign_code
from rollgrad.application.rollouts.generation import in_order
from rollgrad.domain.algorithms.losses.distillation import with_rest
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError
from rollgrad.domain.ports.models import PredictingModel, Predictions, ReferenceModel, TeacherModel, TokenScores

AT_ONCE = 32
"""Requests in flight, each of one sequence."""
PATH = "/v1/completions"
TOKENIZE = "/tokenize"
PATIENCE_SECONDS = 600.0
"""Longest time that an update waits for a server that does not answer or is busy, as one that is started again is."""
QUOTED = 12
"""Tokens that an error quotes."""

Result = TypeVar("Result")

RunsToEnd = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, and returns its result."""


class Place(NamedTuple):
    """Answer of a server about a place: the most likely tokens and their log-probs, and that of its own token."""

    ids: list[int]
    logprobs: list[float]
    own: float


@frozen(kw_only=True)
class Asked:
    """Flags of what a server is asked for, which errors name; `model`: the way to name one of several models."""

    url: str
    model: str
    top_k: str


OF_TEACHER = Asked(url="--teacher.url", model="set --teacher.model_name_or_path to one of them", top_k="--kd.top_k")
OF_REFERENCE = Asked(url="--ref.url", model="set --ref.model_name_or_path to one of them", top_k="--algo.kl.top_k")
OF_TEACHERS = Asked(url="--teacher.urls", model="write MODEL@URL in --teacher.urls", top_k="--kd.top_k")
OF_REFERENCES = Asked(url="--ref.urls", model="write MODEL@URL in --ref.urls", top_k="--algo.kl.top_k")


class ServedModel:
    """A model on an OpenAI-compatible server that answers `prompt_logprobs`, as vLLM does.

    Args:
        url: address of the server; a `/v1` at its end is left out.
        name: the model's, where the server has several; else the only one is asked.
        size: size of the vocabulary; a likely token beyond it is refused.
        asked: flags that errors name.
    """

    def __init__(self, url: str, *, name: str, size: int, asked: Asked) -> None:
        self._client = ServerClient(url)
        self._name = name
        self.size = size
        """Number of tokens of the vocabulary."""
        self.asked = asked
        """Flags that errors name."""

    async def checked(self, texts: Sequence[str], tokenize: Callable[[str], list[int]]) -> Mapping[str, Any]:
        """Returns what the server says of the model that is asked: its `id` and, from vLLM, its `root`. It must
        tokenise texts as `tokenize` does, if it tells its tokens, as vLLM does.

        Raises:
            ConfigurationError: it has other models, or other tokens, so that its log-probs are of other words.
            EngineError: it does not answer.
        """
        return await self._closing(self._checked(texts, tokenize))

    async def places(self, batch: PackedBatch, top_k: int) -> list[Place]:
        """Returns what it says of the action tokens of a batch, with `top_k` likely tokens of each.

        Raises:
            ConfigurationError: the server has no such model, or gives too few log-probs.
            EngineError: it does not answer, or with something else.
        """
        return await self._closing(self._places(batch, top_k))

    async def _checked(self, texts: Sequence[str], tokenize: Callable[[str], list[int]]) -> Mapping[str, Any]:
        model = await self._model()
        for text in texts:
            body = {"model": model["id"], "prompt": text, "add_special_tokens": False}
            status, answer = await self._client.ask(TOKENIZE, body, repeat=True)
            theirs = answer.get("tokens") if status == 200 and isinstance(answer, Mapping) else None
            if isinstance(theirs, list) and theirs != (own := tokenize(text)):
                raise ConfigurationError(
                    f"The server {self._client.url} reads {text!r} as the tokens {theirs[:QUOTED]}, the tokenizer of "
                    f"this run as {own[:QUOTED]}: set {self.asked.url} to a model with the same one."
                )
        return model

    async def _closing(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await work
        finally:
            await self._client.aclose()  # connections belong to an event loop, which ends here

    async def _places(self, batch: PackedBatch, top_k: int) -> list[Place]:
        model = (await self._model(PATIENCE_SECONDS))["id"]
        lengths = batch.lengths_S.tolist()
        tokens_S = torch.split(batch.tokens_N, lengths)
        trained_S = torch.split(batch.action_mask_N, lengths)
        work = (
            self._sequence(model, tokens_T.tolist(), trained_T.nonzero()[:, 0].tolist(), top_k)
            for tokens_T, trained_T in zip(tokens_S, trained_S, strict=True)
        )
        return [place async for places in in_order(work, at_once=AT_ONCE) for place in places]

    async def _sequence(self, model: str, tokens: list[int], trained: Sequence[int], top_k: int) -> list[Place]:
        """Returns the places `trained` of a sequence."""
        body = {
            "model": model,
            "prompt": tokens,
            "max_tokens": 1,  # the least that it samples
            "temperature": 0,
            "prompt_logprobs": top_k,
        }
        status, answer = await self._client.ask(
            PATH, body, repeat=True, places=len(tokens) * (2 + top_k), patience=PATIENCE_SECONDS
        )
        if status != 200:
            refusal = self._client.refusal(PATH, status, answer)
            if status == 400 and "logprobs" in refusal:
                raise ConfigurationError(
                    f"{refusal} Start it with --max-logprobs {top_k}, or lower {self.asked.top_k}."
                )
            raise EngineError(refusal)
        with foreign_code(self._refusal):
            found = answer["choices"][0]["prompt_logprobs"]
            if len(found) != len(tokens):
                raise EngineError(f"The server {self._client.url} read {len(found)} tokens, but got {len(tokens)}.")
            return [self._place(found[index], tokens[index], top_k) for index in trained]

    def _place(self, found: Mapping[str, Mapping[str, Any]], token: int, top_k: int) -> Place:
        """Returns what is said of the place of `token`.

        Raises:
            ConfigurationError: there are too few likely tokens, or one that the student does not have.
            EngineError: `token` is not among those that the server tells of.
        """
        told = {int(id_): float(entry["logprob"]) for id_, entry in found.items()}
        if token not in told:
            raise EngineError(f"The server {self._client.url} tells nothing of the token {token}, which it got.")
        best = sorted(told, key=told.__getitem__, reverse=True)[:top_k]
        if len(best) < top_k:
            raise ConfigurationError(
                f"The server {self._client.url} gives {len(best)} tokens at a place, not {top_k}: lower "
                f"{self.asked.top_k}."
            )
        if max(best, default=0) >= self.size:
            raise ConfigurationError(
                f"The teacher predicts the token {max(best)}, but the actor has {self.size}: set {self.asked.url} to "
                "a model with the actor's tokens."
            )
        return Place(best, [told[id_] for id_ in best], told[token])

    async def _model(self, patience: float = 0.0) -> Mapping[str, Any]:
        with foreign_code(self._refusal):
            models = (await self._client.call("/v1/models", repeat=True, patience=patience))["data"]
            named = [model for model in models if self._name in (model["id"], model.get("root"))]
            if not named and len(models) > 1:
                names = ", ".join(str(model["id"]) for model in models)
                raise ConfigurationError(
                    f"The server {self._client.url} has the models {names}, but none is {self._name!r}: "
                    f"{self.asked.model}."
                )
            found: Mapping[str, Any] = (named or models)[0]
            return found

    def _refusal(self, words: str) -> EngineError:
        return EngineError(
            f"The server {self._client.url} answers otherwise than vLLM does, which tells prompt_logprobs ({words}): "
            f"check {self.asked.url}."
        )


def _predictions(found: Sequence[Place], top_k: int) -> Predictions:
    logprobs_AK = torch.tensor([place.logprobs for place in found]).view(-1, top_k)
    ids_AK = torch.tensor([place.ids for place in found], dtype=torch.int32).view(-1, top_k)
    return Predictions(ids_AK=ids_AK, logprobs_AB=with_rest(logprobs_AK))


class ServedReference(ReferenceModel, PredictingModel):
    """References on servers. What they are asked of a batch is one run of requests, however many passes divide it.
    Methods raise what `ServedModel.places` does, and a `DataError` for a datasource that has no reference.

    Args:
        default: the reference of all datasources that have none of their own; None if there is no such one.
        of_datasource: references by datasource.
        complete: runs a coroutine to its end.
    """

    def __init__(
        self,
        default: ServedModel | None,
        of_datasource: Mapping[str, ServedModel] | None = None,
        *,
        complete: RunsToEnd,
    ) -> None:
        self._default = default
        self._of_datasource = of_datasource or {}
        self._complete = complete

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`; the entropy, of which a server says nothing, is NaN at action tokens."""
        own_A = torch.tensor([place.own for place in self._places(batch, 0)])
        return TokenScores(logprobs_N=batch.placed(own_A), entropy_N=batch.placed(torch.full_like(own_A, torch.nan)))

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Implements `ReferenceModel.logprobs`."""
        return self.score(passes.whole).logprobs_N

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        size = min(model.size for model in (self._default, *self._of_datasource.values()) if model is not None)
        return _predictions(self._places(batch, min(top_k, size)), min(top_k, size))

    def predictions(self, passes: Passes[Any], top_k: int) -> Predictions:
        """Implements `PredictingModel.predictions`."""
        whole = passes.whole
        found = self.predict(whole, top_k)
        return Predictions(ids_AK=whole.placed(found.ids_AK), logprobs_AB=whole.placed(found.logprobs_AB))

    def _places(self, batch: PackedBatch, top_k: int) -> list[Place]:
        """Returns what the references say of the action tokens of a batch, all asked at once."""
        sequences = defaultdict[ServedModel, list[int]](list)
        for sequence in range(len(batch)):
            sequences[self._model_of(batch.datasources_S[sequence] if batch.datasources_S else None)].append(sequence)
        found: list[list[Place]] = self._complete(_together(batch, sequences, top_k))
        numbers_N = torch.zeros(batch.token_count, dtype=torch.int64)
        numbers_N[batch.action_mask_N] = torch.arange(int(batch.action_mask_N.sum()))
        placed: dict[int, Place] = {}
        for own, places in zip(sequences.values(), found, strict=True):
            tokens = batch.token_index(own)
            placed |= zip(numbers_N[tokens[batch.action_mask_N[tokens]]].tolist(), places, strict=True)
        return [placed[number] for number in range(len(placed))]

    def _model_of(self, datasource: str | None) -> ServedModel:
        model = self._default if datasource is None else self._of_datasource.get(datasource, self._default)
        if model is None:
            flag = next(iter(self._of_datasource.values())).asked.url
            raise DataError(without_teacher([str(datasource)], self._of_datasource, flag))
        return model


class ServedTeacher(TeacherModel):
    """Teachers on servers, whose `top_k` most likely tokens are kept."""

    def __init__(self, served: ServedReference, *, top_k: int) -> None:
        self._served = served
        self._top_k = top_k

    def predict(self, batch: PackedBatch) -> Predictions:
        """Implements `TeacherModel.predict`; raises what `ServedReference` does."""
        found = self._served.predict(batch, self._top_k)
        return Predictions(ids_AK=found.ids_AK, logprobs_AB=found.logprobs_AB.half())


def without_teacher(datasources: Sequence[str], known: Collection[str], flag: str) -> str:
    """Returns a sentence about datasources that have no teacher, beside those that are `known` to have one by `flag`,
    such as --ref.urls."""
    return (
        f"Rows of {', '.join(map(repr, datasources))} have no teacher: {flag} has one for "
        f"{', '.join(map(repr, known))} alone. Name a server for these rows there, or set {flag[:-1]}, which has all "
        "others."
    )


async def _together(
    batch: PackedBatch, sequences: Mapping[ServedModel, Sequence[int]], top_k: int
) -> list[list[Place]]:
    """Returns what each model says of its sequences."""
    return await asyncio.gather(*(model.places(batch.select(own), top_k) for model, own in sequences.items()))
