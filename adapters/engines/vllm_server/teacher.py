"""A teacher behind a server: the most likely tokens at each place of token ids, by vLLM's `prompt_logprobs`.

Invariant: token ids go in and out; text is never tokenised. Does not own: whether both vocabularies are the same.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rollgrad.adapters.engines.vllm_server.client import ServerClient
from rollgrad.application.foreign import foreign_code
from rollgrad.application.rollouts.generation import in_order
from rollgrad.domain.algorithms.losses.distillation import with_rest
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.domain.ports.models import Predictions, TeacherModel

AT_ONCE = 32
"""Requests in flight, each of one sequence."""
PATH = "/v1/completions"

Result = TypeVar("Result")
Place = tuple[list[int], list[float]]
"""Ids of the most likely tokens at a place, and their log-probs."""


class ServedTeacher(TeacherModel):
    """A teacher on an OpenAI-compatible server that answers `prompt_logprobs`, as vLLM does.

    Args:
        url: address of the server; a `/v1` at its end is left out.
        name: the model's, where the server has several; else the only one is asked.
        top_k: most likely tokens that are asked for.
        size: of the vocabulary; a token beyond it is refused.
        complete: runs a coroutine to its end.
    """

    def __init__(
        self, url: str, *, name: str, top_k: int, size: int, complete: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self._client = ServerClient(url)
        self._name = name
        self._top_k = min(top_k, size)
        self._size = size
        self._complete = complete

    def predict(self, batch: PackedBatch) -> Predictions:
        """Implements `TeacherModel.predict`.

        Raises:
            ConfigurationError: the server has no such model, or gives too few log-probs.
            EngineError: it does not answer, or with something else.
        """
        places: list[Place] = self._complete(self._closing(self._places(batch)))
        logprobs_AK = torch.tensor([logprobs for _, logprobs in places]).view(-1, self._top_k)
        return Predictions(
            ids_AK=torch.tensor([ids for ids, _ in places], dtype=torch.int32).view(-1, self._top_k),
            logprobs_AB=with_rest(logprobs_AK).half(),
        )

    def model(self) -> Mapping[str, Any]:
        """Returns what the server says of the model that is asked: its `id` and, from vLLM, its `root`."""
        described: Mapping[str, Any] = self._complete(self._closing(self._model()))
        return described

    async def _closing(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await work
        finally:
            await self._client.aclose()  # connections belong to an event loop, which ends here

    async def _places(self, batch: PackedBatch) -> list[Place]:
        model = (await self._model())["id"]
        lengths = batch.lengths_S.tolist()
        tokens_S = torch.split(batch.tokens_N, lengths)
        trained_S = torch.split(batch.action_mask_N, lengths)
        work = (
            self._sequence(model, tokens_T.tolist(), trained_T.nonzero()[:, 0].tolist())
            for tokens_T, trained_T in zip(tokens_S, trained_S, strict=True)
        )
        return [place async for places in in_order(work, at_once=AT_ONCE) for place in places]

    async def _sequence(self, model: str, tokens: list[int], trained: Sequence[int]) -> list[Place]:
        """Returns the places `trained` of a sequence."""
        body = {
            "model": model,
            "prompt": tokens,
            "max_tokens": 1,  # the least that it samples
            "temperature": 0,
            "prompt_logprobs": self._top_k,
        }
        status, answer = await self._client.ask(PATH, body, repeat=True)
        if status != 200:
            refusal = self._client.refusal(PATH, status, answer)
            if status == 400 and "logprobs" in refusal:
                raise ConfigurationError(f"{refusal} Start it with --max-logprobs {self._top_k}, or lower --kd.top_k.")
            raise EngineError(refusal)
        with foreign_code(self._refusal):
            found = answer["choices"][0]["prompt_logprobs"]
            if len(found) != len(tokens):
                raise EngineError(f"The server {self._client.url} read {len(found)} tokens, but got {len(tokens)}.")
            return [self._place(found[index], tokens[index]) for index in trained]

    def _place(self, found: Mapping[str, Mapping[str, Any]], token: int) -> Place:
        """Returns the most likely tokens at the place of `token`.

        Raises:
            ConfigurationError: there are too few, or one that the student does not have.
            EngineError: `token` is not among those that the server tells of.
        """
        told = {int(id_): float(entry["logprob"]) for id_, entry in found.items()}
        if token not in told:
            raise EngineError(f"The server {self._client.url} tells nothing of the token {token}, which it got.")
        best = sorted(told, key=told.__getitem__, reverse=True)[: self._top_k]
        if len(best) < self._top_k:
            raise ConfigurationError(
                f"The server {self._client.url} gives {len(best)} tokens at a place, not {self._top_k}: lower "
                "--kd.top_k."
            )
        if max(best) >= self._size:
            raise ConfigurationError(
                f"The teacher predicts the token {max(best)}, but the actor has {self._size}: set --teacher.url to a "
                "model with the actor's tokens."
            )
        return best, [told[id_] for id_ in best]

    async def _model(self) -> Mapping[str, Any]:
        with foreign_code(self._refusal):
            models = (await self._client.call("/v1/models", repeat=True))["data"]
            named = [model for model in models if self._name in (model["id"], model.get("root"))]
            if not named and len(models) > 1:
                names = ", ".join(str(model["id"]) for model in models)
                raise ConfigurationError(
                    f"The server {self._client.url} has the models {names}, but none is {self._name!r}: set "
                    "--teacher.model_name_or_path to one of them."
                )
            found: Mapping[str, Any] = (named or models)[0]
            return found

    def _refusal(self, words: str) -> EngineError:
        return EngineError(
            f"The server {self._client.url} answers otherwise than vLLM does, which tells prompt_logprobs ({words}): "
            "check --teacher.url."
        )
