"""The Tinker API's messages: requests into values, and results into answers.

The schemas are those of the `tinker` package. What is not supported is refused by its name; nothing is left out in
silence. Does not own: routes, nor the models.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.domain.algorithms.losses.datums import CONSTANTS, DatumObjective
from rollgrad.domain.batches.datums import Datum
from rollgrad.domain.episodes.generation import Generation, SamplingParams, StopReason
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.models import AdamRates

PROTOBUF = "application/x-protobuf"
"""Media type of the messages that are not JSON."""

INPUTS: Mapping[str, frozenset[str]] = {
    name: frozenset(
        {"target_tokens", "weights"} if name == "cross_entropy" else {"target_tokens", "logprobs", "advantages"}
    )
    for name in CONSTANTS
}
"""Tensors that each loss reads."""


@frozen(kw_only=True, eq=False)
class ForwardBackward:
    """A request for a gradient, or with `forward_only` for log-probs alone; its data are in `message`."""

    model_id: str
    sequence: int
    forward_only: bool
    message: Any

    def read(self, vocabulary: int) -> tuple[list[Datum], DatumObjective]:
        """Returns the data and their loss; `vocabulary` is the number of the model's tokens.

        Raises:
            HttpError: 400, they are broken, or what is asked for is not supported.
        """
        objective = _objective(self.message)
        if not self.message.data:
            raise HttpError(400, "The request has no data: send at least one datum.", code="invalid_request")
        datums = []
        for index, datum in enumerate(self.message.data):
            try:
                datums.append(_datum(datum, objective.loss, vocabulary))
            except DataError as error:
                raise HttpError(400, f"data[{index}]: {error}", code="invalid_datum") from None
        return datums, objective


def parse(schema: str, body: Mapping[str, Any]) -> Any:
    """Returns a JSON body as the value of the package's type named `schema`.

    Raises:
        HttpError: 400, the body breaks the schema.
    """
    from tinker import types

    try:
        return getattr(types, schema).model_validate(body)
    except ValueError as error:  # pydantic's
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()  # type: ignore[attr-defined]
        )
        raise HttpError(400, f"The body is no {schema} ({problems}).", code="invalid_request") from None


def unsupported(what: str, remedy: str) -> HttpError:
    """Returns the refusal of something that the API has, and this server has not."""
    return HttpError(400, f"{what} is not supported by rollgrad: {remedy}.", code="unsupported")


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Returns a request for a gradient.

    Raises:
        HttpError: 400, it is no message of that kind.
    """
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2

    message = tinker_public_pb2.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise HttpError(400, "The body is no ForwardBackwardRequest in protobuf.", code="invalid_request") from None
    return ForwardBackward(
        model_id=message.model_id, sequence=message.seq_id, forward_only=message.forward_only, message=message
    )


def _objective(message: Any) -> DatumObjective:
    loss = message.loss_fn
    if loss not in CONSTANTS:
        raise unsupported(f"loss_fn {loss!r}", f"use {', '.join(CONSTANTS)}, or forward_backward_custom")
    given: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise HttpError(400, f"loss_fn_config {name} must be a number.", code="invalid_request")
        given[name] = value.number
    known = CONSTANTS[loss]
    for name, number in given.items():
        if name not in known:
            names = ", ".join(known) or "no constants"
            raise unsupported(f"loss_fn_config {name} of {loss}", f"it takes {names}")
        if not math.isfinite(number) or number < 0:
            raise HttpError(
                400, f"loss_fn_config {name} is {number}, but it must be 0 or more.", code="invalid_request"
            )
    constants = {**known, **given}
    missing = [name for name, value in constants.items() if value is None]
    if missing:
        raise HttpError(400, f"{loss} needs loss_fn_config {', '.join(missing)}.", code="invalid_request")
    return DatumObjective(loss=loss, constants={name: float(value or 0.0) for name, value in constants.items()})


def _datum(message: Any, loss: str, vocabulary: int) -> Datum:
    kinds = {chunk.WhichOneof("chunk") for chunk in message.model_input}
    if kinds - {"encoded_text"}:
        raise DataError("model_input has images or audio, which rollgrad trains on elsewhere only: send text.")
    chunks = [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in message.model_input]
    tokens_T = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *chunks]).astype(np.int64))
    if not len(tokens_T):
        raise DataError("model_input has no tokens.")
    given, wanted = set(message.loss_fn_inputs), INPUTS[loss]
    if given != wanted:
        raise DataError(
            f"loss_fn_inputs has {', '.join(sorted(given)) or 'nothing'}, but {loss} reads {', '.join(sorted(wanted))}."
        )
    columns = {name: _column(name, message.loss_fn_inputs[name], len(tokens_T)) for name in sorted(wanted)}
    targets_T = columns.pop("target_tokens")
    if targets_T.is_floating_point():
        raise DataError("target_tokens must be whole numbers.")
    for name, ids_T in (("model_input", tokens_T), ("target_tokens", targets_T)):
        if not 0 <= int(ids_T.min()) <= int(ids_T.max()) < vocabulary:
            raise DataError(f"{name} has a token outside of the model's, 0 to {vocabulary - 1}.")
    nothing_T = torch.zeros(len(tokens_T))
    return Datum(
        tokens_T=tokens_T,
        targets_T=targets_T,
        weights_T=columns.get("weights", torch.ones(len(tokens_T))).float(),
        sampled_logprobs_T=columns.get("logprobs", nothing_T).float(),
        advantages_T=columns.get("advantages", nothing_T).float(),
    )


def _column(name: str, message: Any, length: int) -> Tensor:
    from tinker.proto import tinker_public_pb2 as proto

    if message.WhichOneof("encoding") == "sparse_csr" or len(message.shape) > 1:
        raise DataError(f"{name} has several values a token; rollgrad takes one, in a dense tensor.")
    kinds = {proto.DTYPE_FLOAT32: np.float32, proto.DTYPE_INT64: np.int64, proto.DTYPE_INT32: np.int32}
    if message.dtype not in kinds or len(message.dense) % np.dtype(kinds[message.dtype]).itemsize:
        raise DataError(f"{name} must be a tensor of float32, int64 or int32.")
    values = np.frombuffer(message.dense, kinds[message.dtype])
    if len(values) != length:
        raise DataError(f"{name} has {len(values)} values, but model_input has {length} tokens.")
    if not np.isfinite(values).all():
        raise DataError(f"{name} has a value that is not finite.")
    return torch.from_numpy(values.astype(np.float32 if values.dtype == np.float32 else np.int64))


def forward_backward_output(logprobs: Sequence[Tensor], loss: float) -> bytes:
    """Returns the answer to a `ForwardBackward`: logprobs_T of each datum, and the summed loss."""
    from tinker.proto import tinker_public_pb2 as proto

    arrays = [values_T.float().cpu().numpy() for values_T in logprobs]
    ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    column = proto.BatchedTensor(
        data=np.concatenate(arrays).tobytes(), offsets=ends.tobytes(), dtype=proto.DTYPE_FLOAT32
    )
    record = proto.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": column}, num_datums=len(arrays))
    answer: bytes = proto.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": loss}
    ).SerializeToString()
    return answer


def read_rates(request: Any) -> AdamRates:
    """Returns the constants of an `OptimStepRequest`.

    Raises:
        HttpError: 400, it is of another optimizer, or a constant is out of range.
    """
    from tinker import types

    params = request.optim_params
    if not isinstance(params, types.AdamParams):
        raise unsupported(f"the optimizer {params.type!r}", "use AdamParams")
    rates = {
        name: getattr(params, name)
        for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    }
    for name, value in rates.items():
        if not 0 <= value < (1 if name.startswith("beta") else math.inf):
            raise HttpError(400, f"{name} is {value}, which is out of range.", code="invalid_request")
    return AdamRates(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_norm=params.grad_clip_norm,
    )


UNSUPPORTED_IN_SAMPLES = (
    *("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"),
    *("prompt_logprobs_last_n", "record_stability_info"),
)
"""Fields of a `SampleRequest` that are refused unless they are empty."""


def read_prompt(request: Any) -> tuple[int, ...]:
    """Returns the tokens of a `SampleRequest`'s prompt.

    Raises:
        HttpError: 400, it is empty or no text, or the request asks for what is not supported.
    """
    for name in UNSUPPORTED_IN_SAMPLES:
        if getattr(request, name):
            remedy = "use a loss other than stable_reinforce" if name == "record_stability_info" else "leave it out"
            raise unsupported(name, remedy)
    try:
        tokens = tuple(request.prompt.to_ints())
    except ValueError:
        raise unsupported("a prompt with images or audio", "send text") from None
    if not tokens:
        raise HttpError(400, "The prompt has no tokens.", code="invalid_request")
    return tokens


def read_sampling(request: Any, seed: int, room: int | None) -> SamplingParams:
    """Returns the sampling settings of a `SampleRequest`, whose `seed` is used where it has none. `room`: tokens that
    the model has left after the prompt, which bound a reply without `max_tokens`.

    Raises:
        HttpError: 400, a setting is out of range or not supported.
    """
    given = request.sampling_params
    stop = given.stop
    if stop is not None and not stop:
        raise unsupported("stop=[], which lets a reply go on after its end", "leave stop out")
    words = [stop] if isinstance(stop, str) else list(stop or ())
    if "" in words:  # every text contains the empty one
        raise unsupported("an empty text in stop", "leave it out")
    longest = room if given.max_tokens is None else given.max_tokens
    if longest is None:
        raise HttpError(400, "max_tokens is not set, and the model names no limit: set it.", code="invalid_request")
    try:
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            max_new_tokens=longest,
            stop_strings=tuple(word for word in words if isinstance(word, str)),
            stop_token_ids=tuple(word for word in words if isinstance(word, int)),
            seed=seed if given.seed is None else given.seed % 2**62,
        )
    except ValueError as error:
        raise HttpError(
            400, f"A sampling parameter is out of range: {error.args[0]}.", code="invalid_request"
        ) from None


def sample_output(generations: Sequence[Generation], prompt_logprobs_T: Tensor | None) -> bytes:
    """Returns the answer to a `SampleRequest`; the first token of a prompt has the log-prob NaN."""
    from tinker.proto import tinker_public_pb2 as proto

    reasons = {StopReason.STOP: proto.STOP_REASON_STOP, StopReason.LENGTH: proto.STOP_REASON_LENGTH}
    sequences = [
        proto.SampledSequence(
            stop_reason=reasons[generation.stop_reason],
            tokens=np.asarray(generation.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(generation.logprobs, np.float32).tobytes(),
        )
        for generation in generations
    ]
    scored = None if prompt_logprobs_T is None else prompt_logprobs_T.float().cpu().numpy().tobytes()
    answer: bytes = proto.SampleResponse(sequences=sequences, prompt_logprobs=scored).SerializeToString()
    return answer
