"""The two endpoints that take and return token ids.

`TokensWire` is vLLM's own, which also says which weights drew each token. `CompletionsWire` is that of OpenAI with the
field `return_token_ids`, which vLLM and others know. Neither side makes tokens out of text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from rollgrad.adapters.engines.vllm.async_llm import STOP_REASONS
from rollgrad.adapters.engines.vllm.sampling_params import plain_parameters
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.domain.errors import DataError, EngineError

MOST_LOGPROBS = 20
"""Log-probs of a place that vLLM's server gives at most, unless it is started with another --max-logprobs."""
SPANS = "weight_versions"
"""Field of the versions of a reply's tokens; of a streamed reply the last part has it for all."""
IMPOSSIBLE = -9999.0
"""Log-prob that vLLM's server writes for minus infinity."""


class Wire(Protocol):
    """One endpoint."""

    path: str

    def body(self, name: str, request: GenerationRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
        """Returns the body of a request."""
        ...

    def read(self, answer: Any, version: int) -> Generation:
        """Parses an answer; `version` is that of the weights, for a wire that does not carry it.

        Raises:
            EngineError: it is no reply in token ids with log-probs.
        """
        ...


@frozen
class TokensWire(Wire):
    """vLLM's `/inference/v1/generate`."""

    path: str = "/inference/v1/generate"

    def body(self, name: str, request: GenerationRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
        """Implements `Wire.body`."""
        params = plain_parameters(request, eos_token_ids)
        grammar = request.params.grammar
        top_logprobs = request.params.top_logprobs
        if grammar is not None:
            params["structured_outputs"] = {"grammar": grammar}
        return {
            "request_id": name,
            "token_ids": list(request.prompt_token_ids),
            "sampling_params": {
                **params,
                # The token that is drawn comes first, and as many in all as asked for.
                "logprobs": top_logprobs and min(top_logprobs + 1, MOST_LOGPROBS),
                "detokenize": bool(request.params.stop_strings),
            },
        }

    def read(self, answer: Any, version: int) -> Generation:
        """Implements `Wire.read`."""
        choice = _choice(answer)
        content = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = [one["logprob"] for one in content]
        spans = choice.get(SPANS) or ()
        versions = [_version(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        return _generation(
            choice, logprobs, versions, [_top_logprobs(one.get("top_logprobs") or ()) for one in content]
        )

    def probe_body(self, name: str, prompt: Sequence[int], token: int, temperature: float) -> dict[str, Any]:
        """Returns the body of a request for the log-prob of `token` after `prompt`."""
        return {
            "request_id": name,
            "token_ids": list(prompt),
            "sampling_params": {
                "temperature": temperature,
                "max_tokens": 1,
                "logprobs": 2,  # as many come back, the token that is drawn being the first
                "logprob_token_ids": [token, token],
                "skip_reading_prefix_cache": True,
                "detokenize": False,
            },
        }

    def read_probe(self, answer: Any, token: int) -> float:
        """Returns the log-prob that `probe_body` asked for.

        Raises:
            EngineError: it is not there.
        """
        content = (_choice(answer).get("logprobs") or {}).get("content") or ()
        for one in [*content, *(top for position in content for top in position["top_logprobs"])]:
            if one["token_id"] == token:
                return float(one["logprob"])
        raise EngineError(f"The server did not give the log-prob of token {token} that it was asked for.")


@frozen
class CompletionsWire(Wire):
    """OpenAI's `/v1/completions`, `model` being the name that the server knows its model by."""

    model: str
    path: str = "/v1/completions"

    def body(self, name: str, request: GenerationRequest, eos_token_ids: frozenset[int]) -> dict[str, Any]:
        """Implements `Wire.body`."""
        if request.params.grammar is not None or request.params.top_logprobs:
            raise DataError(
                "The server that samples has OpenAI's completions alone, which follow no grammar and tell no other "
                "tokens' log-probs: leave response_format, tool_choice and top_logprobs out, or start vLLM with "
                "--enable-scale-out."
            )
        return {
            "model": self.model,
            "prompt": list(request.prompt_token_ids),
            **plain_parameters(request, eos_token_ids),
            "logprobs": 1,
            "return_token_ids": True,
        }

    def read(self, answer: Any, version: int) -> Generation:
        """Implements `Wire.read`."""
        choice = _choice(answer)
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return _generation(choice, logprobs, [version] * len(choice.get("token_ids") or ()))


@define
class JoinedAnswer:
    """The answer of either endpoint, joined of the parts that a server streams, for `Wire.read`."""

    params: SamplingParams
    """Parameters of the request."""
    whole: dict[str, Any] = field(factory=dict)
    _choice: dict[str, Any] = field(factory=dict)

    def take(self, part: Any) -> Sequence[int]:
        """Adds a part; returns its token ids.

        Raises:
            EngineError: it is none of a completion, or there are more tokens than were asked for.
        """
        if isinstance(part, dict) and part.get("choices") == []:  # counts of tokens, after the last
            return []
        choice = _choice(part)
        self.whole = {**part, **self.whole, "choices": [self._choice]}
        for name, value in choice.items():
            if isinstance(value, list) and name != SPANS:
                self._choice.setdefault(name, []).extend(value)
            elif isinstance(value, dict):
                lists = self._choice.setdefault(name, {})
                for one in (key for key in value if isinstance(value[key], list)):
                    lists.setdefault(one, []).extend(value[one])
            elif value is not None:
                self._choice[name] = value
        if len(self._choice.get("token_ids") or ()) > (most := self.params.max_new_tokens):
            raise EngineError(f"The server streams more than the {most} tokens that it was asked for.")
        tokens: Sequence[int] = choice.get("token_ids") or []
        return tokens


def places(params: SamplingParams) -> int:
    """Returns how many log-probs a reply may have: of each token, and of the likely ones in its place."""
    return params.max_new_tokens * (2 + params.top_logprobs)


def _choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineError(f"The server answered {str(answer)[:200]!r}, which is no completion.")
    return choices[0]


def _version(label: str) -> int:
    """Returns the version in a label; the label of a server's first weights is 0."""
    return int(label) if label.isdecimal() else 0


def _top_logprobs(given: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Returns the possible tokens of a place, the likeliest first."""
    pairs = [(one["token_id"], one["logprob"]) for one in given if one["logprob"] > IMPOSSIBLE]
    return sorted(pairs, key=lambda pair: -pair[1])


def _generation(
    choice: Mapping[str, Any],
    logprobs: Sequence[float],
    versions: Sequence[int],
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = (),
) -> Generation:
    tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
    if reason not in STOP_REASONS:
        raise EngineError(f"Generation failed: the server ended the request with {reason!r}.")
    if tokens is None or not len(tokens) == len(logprobs) == len(versions):
        raise EngineError(
            f"The server gave {'no' if tokens is None else len(tokens)} token ids, {len(logprobs)} log-probs and "
            f"{len(versions)} versions of one reply, but each of its tokens has all three."
        )
    return Generation(
        token_ids=tokens,
        logprobs=logprobs,
        versions=versions,
        stop_reason=STOP_REASONS[reason],
        top_logprobs=top_logprobs,
    )
