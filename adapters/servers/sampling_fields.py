"""Settings of a request's body by which replies are sampled: each is read, and all that are wrong are told at once."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rollgrad.adapters.servers.guard import HttpError
from rollgrad.adapters.servers.wire import bad, count, number, read

MIN_TEMPERATURE = 1e-3
"""Temperature below which sampling is greedy."""
MAX_STOPS = 64
"""Largest number of stop texts of a request, each of which is searched for after every token."""

Reader = Callable[[], Any]
"""Function that returns a value of a body, or raises an `HttpError`."""


def read_all(*checks: Reader, **readers: Reader) -> dict[str, Any]:
    """Returns what each of `readers` returns, by its name.

    Raises:
        HttpError: at least one of them, or of `checks`, refuses; the message has the sentence of each that does.
    """
    values, refusals = {}, []
    for name, reader in [*((None, check) for check in checks), *readers.items()]:
        try:
            values[name] = reader()
        except HttpError as error:
            refusals.append(error)
    if refusals:
        raise HttpError(
            400, " ".join(error.detail for error in refusals), code=refusals[0].code, param=refusals[0].param
        )
    return {name: value for name, value in values.items() if name is not None}


def refuse_others(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses settings with values other than `neutral` ones, which change nothing.

    Raises:
        HttpError: at least one has another; the message has a sentence for each.
    """
    others = [name for name, values in neutral.items() if body.get(name) is not None and body[name] not in values]
    told = [
        f"{name} is {json.dumps(body[name])[:60]}, which this server cannot do: leave {name} out." for name in others
    ]
    if told:
        raise bad(" ".join(told), param=others[0])


def sampling_of(body: Mapping[str, Any], *budgets: str) -> dict[str, Reader]:
    """Returns readers of the sampling settings that OpenAI's wires share, by field of `SamplingParams`; a setting that
    is absent is read as None.

    Args:
        body: body of the request.
        budgets: names of the field with the largest number of tokens, the first that is set counts.
    """

    def top_k() -> int | None:
        value = count(body, "top_k", -1)
        return None if value is None else max(0, value)

    def seed() -> int | None:
        value = count(body, "seed", -(2**63), 2**63 - 1)
        return None if value is None else value % 2**63

    return {
        "temperature": lambda: temperature(body, 2),
        "top_p": lambda: number(body, "top_p", 1e-6, 1),
        "top_k": top_k,
        "max_new_tokens": lambda: next(filter(None, (count(body, name) for name in budgets)), None),
        "seed": seed,
    }


def temperature(body: Mapping[str, Any], high: float) -> float | None:
    """Returns the field `temperature`, None if absent. A value near 0 becomes 0, because logits are divided by it."""
    value = number(body, "temperature", 0, high)
    return 0.0 if value is not None and value < MIN_TEMPERATURE else value


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Returns the texts that end a reply, None if there are none."""
    value = read(body, name, (str, list))
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise bad(f"{name} must be a text, or a list of texts, none of them empty.", param=name)
    if len(texts) > MAX_STOPS:
        raise bad(f"{name} has {len(texts)} texts, but it may have {MAX_STOPS} at most.", param=name)
    return texts or None
