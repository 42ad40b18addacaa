"""A server that answers as vLLM 0.32 does, with tokens that it makes up; what it lacks is a test's to choose."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgrad.adapters.chat.pictures import ImageRenderer
from tests.fakes.reward_server import JsonServer

CONTROLS = frozenset(
    {
        "/pause",
        "/resume",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/reset_prefix_cache",
    }
)
"""Paths that vLLM has in its development mode only."""


class ModelServer(JsonServer):
    """Counts tokens up from 100. `fails`: statuses of the next answers to requests for replies, before any is given.
    `hold`: replies wait until it is set, streamed ones after their first token. `breaks`: numbers of tokens after which
    the next streams end, None for a whole one. `shift` is added to all tokens. `renderer` is that of the images that it
    sees, None if it overlooks them."""

    def __init__(
        self,
        *,
        tokens: bool = True,
        token_ids: bool = True,
        processed: bool = True,
        develops: bool = True,
        backend: str | None = "rollgrad",
        token: str | None = None,
        renderer: ImageRenderer | None = None,
        forms: str = "auto",
        quantization: str | None = None,
        guesses: dict[str, Any] | None = None,
        port: int = 0,
    ) -> None:
        self.fails: list[int] = []
        self.paused = self.starting = False
        self.version = "default"
        self.hold = threading.Event()
        self.hold.set()
        self.breaks: list[int | None] = []
        self.shift = 0
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        self._tokens, self._token_ids, self._processed = tokens, token_ids, processed
        self.renderer = renderer
        self._develops, self._backend, self._token, self._forms = develops, backend, token, forms
        self._quantization, self._guesses = quantization, guesses
        super().__init__(self._answer, port=port)

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if self._token is not None and self.headers[-1].get("Authorization") != f"Bearer {self._token}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy", "max_model_len": 512}]}
        if path == "/health":
            return 200, ""
        if path == "/v1/completions" or (path == "/inference/v1/generate" and self._tokens):
            return self._reply(path, body)
        if self._develops and path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if self._develops and path == "/server_info" and self.starting:
            return 503, "starting"
        if self._develops and path == "/server_info":
            transfer = None if self._backend is None else {"backend": self._backend}
            config = {
                "weight_transfer_config": transfer,
                "model_config": {"dtype": "torch.float32", "quantization": self._quantization},
                "cache_config": {"cache_dtype": "auto"},
                "structured_outputs_config": {"backend": self._forms},
                "speculative_config": self._guesses,
            }
            return 200, {"vllm_config": config}
        if self._develops and path in CONTROLS:
            return self._control(path, body)
        return 404, {"detail": "Not Found"}

    def _control(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/init_weight_transfer_engine" and not Path(body["init_info"]["path"]).exists():
            return 500, {"error": {"message": "No such file or directory"}}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return 200, {}

    def _reply(self, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            fails = self.fails.pop(0) if self.fails else None
        if not body.get("stream"):
            self.hold.wait(300)
        with self._lock:
            self.in_flight -= not body.get("stream") or fails is not None
        if fails is not None:
            return fails, {"error": {"message": "not now"}}
        params = body.get("sampling_params", body)
        ids = [100 + self.shift + index for index in range(params["max_tokens"])]
        logprobs = [0.0 if params["top_k"] == 1 and self._processed else -0.5 for _ in ids]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if path == "/v1/completions":
            choice |= {"text": "some\u2028text\x85", "logprobs": {"token_logprobs": logprobs}}
            if self._token_ids and body.get("return_token_ids"):
                choice["token_ids"] = ids
        else:
            content = [{"token_id": one, "logprob": logprob} for one, logprob in zip(ids, logprobs, strict=True)]
            span = {"version": self.version, "start": 0, "end": len(ids)}
            choice |= {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": [span]}
        answer = {"choices": [choice], **self._seen(body)}
        return 200, self._streamed(answer) if body.get("stream") else answer

    def _streamed(self, answer: dict[str, Any]) -> Iterator[str]:
        """A token a part; the last one says how it ended, with which weights."""
        whole = answer["choices"][0]
        ends = {name: None for name in ("finish_reason", "weight_versions") if name in whole}
        broken = self.breaks.pop(0) if self.breaks else None
        try:
            for place, token in enumerate(whole["token_ids"]):
                if place == broken:
                    raise ConnectionError
                if place == 1:
                    self.hold.wait(300)
                logprobs = {name: values[place : place + 1] for name, values in whole["logprobs"].items()}
                last = place + 1 == len(whole["token_ids"])
                part = {**whole, **({} if last else ends), "token_ids": [token], "logprobs": logprobs}
                event = {**(answer if place == 0 else {}), "choices": [part]}
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"  # as vLLM writes it
            yield "data: [DONE]\n\n"
        finally:
            with self._lock:
                self.in_flight -= 1

    def _seen(self, body: Any) -> dict[str, Any]:
        """Each image is in the place of the next placeholder, as with vLLM."""
        parts = iter(body.get("content_parts") or ())
        if self.renderer is None or not body.get("return_token_ids") or "token_ids" not in body:
            return {}
        tokens: list[int] = []
        places = []
        for token in body["token_ids"]:
            part = next(parts, None) if token == self.renderer.mark_token else None
            if part is None:
                tokens.append(token)
                continue
            data = base64.b64decode(part["url"].partition(";base64,")[2])
            expanded, _ = self.renderer.sequence(self.renderer.mark, data)
            places.append({"offset": len(tokens), "length": len(expanded)})
            tokens += expanded
        return {"prompt_token_ids": tokens, "mm_placeholders": {"image": places}}
