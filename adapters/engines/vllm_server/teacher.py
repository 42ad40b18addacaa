"""A teacher or a reference behind a server: log-probs at each place of token ids, by vLLM's `prompt_logprobs`.

Invariant: token ids go in and out; text is never tokenised. Does not own: whether both vocabularies are the same.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
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
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.domain.ports.models import PredictingModel, Predictions, ReferenceModel, TeacherModel, TokenScores

AT_ONCE = 32
"""Requests in flight, each of one sequence."""
PATH = "/v1/completions"

Result = TypeVar("Result")


class Place(NamedTuple):
    """Answer of a server about a place: the most likely tokens and their log-probs, and that of its own token."""

    ids: list[int]
    logprobs: list[float]
    own: float


@frozen(kw_only=True)
class Asked:
    """Flags of what a server is asked for, which errors name."""

    url: str
    model: str
    top_k: str


OF_TEACHER = Asked(url="--teacher.url", model="--teacher.model_name_or_path", top_k="--kd.top_k")
OF_REFERENCE = Asked(url="--ref.url", model="--ref.model_name_or_path", top_k="--algo.kl.top_k")


class ServedModel:
    """A model on an OpenAI-compatible server that answers `prompt_logprobs`, as vLLM does.

    Args:
        url: address of the server; a `/v1` at its end is left out.
        name: the model's, where the server has several; else the only one is asked.
        size: of the vocabulary; a likely token beyond it is refused.
        complete: runs a coroutine to its end.
        asked: flags that errors name.
    """

    def __init__(
        self, url: str, *, name: str, size: int, complete: Callable[[Coroutine[Any, Any, Any]], Any], asked: Asked
    ) -> None:
        self._client = ServerClient(url)
        self._name = name
        self._size = size
        self._complete = complete
        self._asked = asked

    def model(self) -> Mapping[str, Any]:
        """Returns what the server says of the model that is asked: its `id` and, from vLLM, its `root`."""
        described: Mapping[str, Any] = self._complete(self._closing(self._model()))
        return described

    def places(self, batch: PackedBatch, top_k: int) -> list[Place]:
        """Returns what it says of the action tokens of a batch, with `top_k` likely tokens of each.

        Raises:
            ConfigurationError: the server has no such model, or gives too few log-probs.
            EngineError: it does not answer, or with something else.
        """
        found: list[Place] = self._complete(self._closing(self._places(batch, min(top_k, self._size))))
        return found

    def predictions(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Returns its predictions of the action tokens; raises what `places` does."""
        found, count = self.places(batch, top_k), min(top_k, self._size)
        logprobs_AK = torch.tensor([place.logprobs for place in found]).view(-1, count)
        ids_AK = torch.tensor([place.ids for place in found], dtype=torch.int32).view(-1, count)
        return Predictions(ids_AK=ids_AK, logprobs_AB=with_rest(logprobs_AK))

    async def _closing(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await work
        finally:
            await self._client.aclose()  # connections belong to an event loop, which ends here

    async def _places(self, batch: PackedBatch, top_k: int) -> list[Place]:
        model = (await self._model())["id"]
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
        status, answer = await self._client.ask(PATH, body, repeat=True)
        if status != 200:
            refusal = self._client.refusal(PATH, status, answer)
            if status == 400 and "logprobs" in refusal:
                raise ConfigurationError(
                    f"{refusal} Start it with --max-logprobs {top_k}, or lower {self._asked.top_k}."
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
                f"{self._asked.top_k}."
            )
        if max(best, default=0) >= self._size:
            raise ConfigurationError(
                f"The teacher predicts the token {max(best)}, but the actor has {self._size}: set {self._asked.url} to "
                "a model with the actor's tokens."
            )
        return Place(best, [told[id_] for id_ in best], told[token])

    async def _model(self) -> Mapping[str, Any]:
        with foreign_code(self._refusal):
            models = (await self._client.call("/v1/models", repeat=True))["data"]
            named = [model for model in models if self._name in (model["id"], model.get("root"))]
            if not named and len(models) > 1:
                names = ", ".join(str(model["id"]) for model in models)
                raise ConfigurationError(
                    f"The server {self._client.url} has the models {names}, but none is {self._name!r}: set "
                    f"{self._asked.model} to one of them."
                )
            found: Mapping[str, Any] = (named or models)[0]
            return found

    def _refusal(self, words: str) -> EngineError:
        return EngineError(
            f"The server {self._client.url} answers otherwise than vLLM does, which tells prompt_logprobs ({words}): "
            f"check {self._asked.url}."
        )


class ServedTeacher(TeacherModel):
    """A teacher on a server, whose `top_k` most likely tokens are kept; other arguments as of `ServedModel`."""

    def __init__(
        self, url: str, *, name: str, top_k: int, size: int, complete: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._served = ServedModel(url, name=name, size=size, complete=complete, asked=OF_TEACHER)
        self._top_k = top_k

    def predict(self, batch: PackedBatch) -> Predictions:
        """Implements `TeacherModel.predict`; raises what `ServedModel.places` does."""
        found = self._served.predictions(batch, self._top_k)
        return Predictions(ids_AK=found.ids_AK, logprobs_AB=found.logprobs_AB.half())

    def model(self) -> Mapping[str, Any]:
        """Returns what `ServedModel.model` does."""
        return self._served.model()


class ServedReference(ReferenceModel, PredictingModel):
    """A reference on a server. What it is asked of a batch is one run of requests, however many passes divide it.
    Its methods raise what `ServedModel.places` does."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`; the entropy, of which a server says nothing, is NaN at action tokens."""
        own_A = torch.tensor([place.own for place in self._served.places(batch, 0)])
        return TokenScores(logprobs_N=batch.placed(own_A), entropy_N=batch.placed(torch.full_like(own_A, torch.nan)))

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Implements `ReferenceModel.logprobs`."""
        return self.score(passes.whole).logprobs_N

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        return self._served.predictions(batch, top_k)

    def predictions(self, passes: Passes[Any], top_k: int) -> Predictions:
        """Implements `PredictingModel.predictions`."""
        whole = passes.whole
        found = self.predict(whole, top_k)
        return Predictions(ids_AK=whole.placed(found.ids_AK), logprobs_AB=whole.placed(found.logprobs_AB))
