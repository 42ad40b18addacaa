"""A teacher behind a server, which computes with a real model."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, Teacher
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.references import TorchTeacher
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from tests.fakes.reward_server import JsonServer


class TeacherServer(JsonServer):
    """Answers `prompt_logprobs` as vLLM does, with the predictions of a model, and tokenises with `tokenize`;
    `failures` are the statuses of the next answers, `changed` changes an answer."""

    def __init__(self, path: Path) -> None:
        model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="--teacher")
        self.model = model
        self.failures: list[int] = []
        self.changed: Callable[[list[Any]], None] = lambda places: None
        self._one_at_a_time = threading.Lock()
        self.tokenize = load_tokenizer(str(path), flag="--teacher")
        self.models: list[Any] = [{"id": "other"}, {"id": "teacher", "root": str(path)}]
        super().__init__(self._answer)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Returns the requests for log-probs."""
        return [body for body in self.bodies if "prompt_logprobs" in body]

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": self.models}
        assert body["model"] == "teacher"
        if path == "/tokenize":
            return 200, {"tokens": self.tokenize(body["prompt"], add_special_tokens=False).input_ids}
        if self.failures:
            return self.failures.pop(0), {"error": {"message": "not now"}}
        tokens, k = body["prompt"], body["prompt_logprobs"]
        if k > 20:
            return 400, {"error": {"message": f"Requested prompt logprobs of {k}, which is greater than max allowed"}}
        row = WeightedTokens(
            token_ids_T=torch.tensor(tokens), weights_T=(torch.arange(len(tokens)) > 0).float(), prompt_length=1
        )
        batch = pack_sequences([row], group_ids=[0], sample_ids=[0])
        size = self.model.config.vocab_size
        with self._one_at_a_time:  # requests come together, and to make a teacher changes the model for a moment
            teacher = TorchTeacher(Teacher(self.model, DistillationSettings(top_k=size)), size)
            found = teacher.predict(batch)
        places: list[Any] = [None]
        for token, ids, logprobs in zip(tokens[1:], found.ids_AK.tolist(), found.logprobs_AB.tolist(), strict=True):
            ranked = list(enumerate(zip(ids, logprobs[:-1], strict=True), 1))
            kept = [entry for entry in ranked if entry[0] <= k or entry[1][0] == token]
            places.append({str(id_): {"logprob": logprob, "rank": rank} for rank, (id_, logprob) in kept})
        self.changed(places)
        return 200, {"choices": [{"text": "x", "prompt_logprobs": places}]}
