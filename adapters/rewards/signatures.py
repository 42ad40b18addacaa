"""Arguments of a reward function, which follow from the names of its parameters.

| parameters | convention | a call | prompts, completions |
|---|---|---|---|
| `solution_str` | verl | judges one reply | text of the reply alone |
| `completions` or `completion_ids`, no `queries` | TRL | judges several | messages if the row has messages, else text |
| any others | OpenRLHF | judges several | texts: the rendered prompt, the reply |

Whatever the convention, a parameter may also be any name of `NAMES` or any column of the row; `**kwargs` gets all.
Does not own: the call and its result.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from attrs import define, field, frozen

from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import ConfigurationError

OPENRLHF_NAMES = ("queries", "prompts", "labels")
"""Arguments in OpenRLHF; a function with other names gets them by position."""
NAMES = (*OPENRLHF_NAMES, "completions", "messages", "tokens", "metadata", "step")
"""Names of parameters that a function may have besides columns of the row."""
TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments in TRL 1.16 besides columns (`GRPOTrainer._calculate_rewards`)."""
TRL_LEFT_OUT = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not pass."""
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of `compute_score` in verl."""
SINGULAR = {"query", "prompt", "label"}
"""Parameters that mean `OPENRLHF_NAMES` by position, even if columns have these names."""


class Convention(StrEnum):
    """Project whose calling convention a function follows."""

    OPENRLHF = "openrlhf"
    TRL = "trl"
    VERL = "verl"


@frozen
class TrainerState:
    """The part of TRL's `trainer_state` that exists here: the number of updates so far."""

    global_step: int


@define
class Notes:
    """Values that a function logged: numbers of the whole call, and columns with a value for each reply."""

    metrics: dict[str, float] = field(factory=dict)
    columns: dict[str, list[Any]] = field(factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Implements TRL's `log_metric`."""
        self.metrics[name] = float(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Implements TRL's `log_extra`."""
        self.columns[column] = list(values)


@frozen
class Call:
    """Arguments of one call."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(factory=dict)


class Signature:
    """The parameters of a reward function, which `name` names in errors.

    Raises:
        ConfigurationError: nothing can be passed to it.
    """

    def __init__(self, func: Callable[..., Any], name: str) -> None:
        self._name = name
        try:
            parameters = list(inspect.signature(func).parameters.values())
        except (TypeError, ValueError):  # a built-in function without a signature
            parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = frozenset(p.name for p in by_name)
        self._required = tuple(p.name for p in by_name if p.default is p.empty)
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._by_position = _takes_three(parameters)
        nameless = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
        self._nameless = nameless or not (self._names or self._takes_any)
        if self._nameless and not self._by_position:
            raise ConfigurationError(
                f"{name} takes {'no parameters' if not parameters else 'parameters without a name'}, but a reward "
                f"function is told of the replies by name: give it some of {', '.join(NAMES)}, or columns of the row."
            )

    @property
    def convention(self) -> Convention:
        """Convention that the names of the parameters follow."""
        if "solution_str" in self._names:
            return Convention.VERL
        if "queries" in self._names:  # each begins with its prompt, which must then be a text
            return Convention.OPENRLHF
        return Convention.TRL if {"completions", "completion_ids"} & self._names else Convention.OPENRLHF

    def calls(self, requests: Sequence[RewardRequest], notes: Notes) -> list[Call]:
        """Returns the calls that judge the requests: one for all of them, or one each by verl's convention.

        Raises:
            ConfigurationError: a required parameter is neither known nor a column.
        """
        if self.convention is Convention.VERL:
            return [Call(keywords=self._keywords(_verl(request), request.prompt)) for request in requests]
        offered = _offered(requests, notes, self.convention)
        if self._is_positional(offered):
            return [Call(positional=tuple(offered[name] for name in OPENRLHF_NAMES))]
        return [Call(keywords=self._keywords(offered, requests[0].prompt))]

    def _is_positional(self, offered: Mapping[str, Any]) -> bool:
        """Returns whether the function's parameters have unknown names, so that it gets queries, prompts and labels in
        this order."""
        if self._nameless or self._takes_any or not self._by_position:
            return self._nameless
        unknown = self._names - offered.keys()
        return unknown == self._names or (bool(unknown) and set(self._required) == SINGULAR)

    def _keywords(self, offered: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
        missing = [name for name in self._required if name not in offered]
        if not (missing or self._takes_any or self._names & offered.keys()):
            missing = sorted(self._names)
        if missing:
            columns = ", ".join(sorted(prompt.metadata)) or "none"
            known = VERL_NAMES if self.convention is Convention.VERL else dict.fromkeys((*NAMES, *TRL_NAMES))
            similar = difflib.get_close_matches(missing[0], [*known, *prompt.metadata], n=1)
            hint = f" ({similar[0]}?)" if similar else ""
            raise ConfigurationError(
                f"{self._name} has the parameter {missing[0]!r}, which is neither known to reward functions "
                f"({', '.join(known)}) nor a column of {prompt.datasource!r} ({columns}): rename it{hint}, give "
                "it a default, or choose a --data.prompt_dataset with such a column."
            )
        if self._takes_any and self.convention is Convention.VERL:
            return {name: value for name, value in offered.items() if name in VERL_NAMES or name in self._names}
        return {name: value for name, value in offered.items() if self._takes_any or name in self._names}


def _takes_three(parameters: Sequence[inspect.Parameter]) -> bool:
    try:
        inspect.Signature(parameters).bind(*OPENRLHF_NAMES)
    except TypeError:
        return False
    return True


def _offered(requests: Sequence[RewardRequest], notes: Notes, convention: Convention) -> dict[str, Any]:
    """Returns all arguments that a function of this convention may take, by name."""
    rows = [request.prompt.metadata for request in requests]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    tokens = [list(request.response_token_ids) for request in requests]
    step = max(request.step for request in requests)
    own: dict[str, Any] = {
        "queries": [request.query for request in requests],
        "labels": [request.label for request in requests],
        "messages": [[*_prompt_messages(request.prompt), *map(dict, request.completion)] for request in requests],
        "tokens": tokens,
        "metadata": [dict(row) for row in rows],
        "step": step,
    }
    is_trl = convention is Convention.TRL
    both = {
        "prompts": [_trl_prompt(request) if is_trl else request.prompt.text for request in requests],
        "completions": [_trl_completion(request) if is_trl else request.response for request in requests],
        "completion_ids": tokens,
        "trainer_state": TrainerState(global_step=step),
        "log_extra": notes.log_extra,
        "log_metric": notes.log_metric,
    }
    if is_trl:  # here `labels` or `step` is a column, if there is one of this name
        return own | {name: values for name, values in columns.items() if name not in TRL_LEFT_OUT} | both
    return columns | both | own


def _prompt_messages(prompt: Prompt) -> list[Mapping[str, Any]]:
    return list(map(dict, prompt.messages)) or [{"role": "user", "content": prompt.text}]


def conversational(prompt: Prompt) -> bool:
    """Returns whether the row's prompt is a list of messages, not a text that became a message here."""
    if not prompt.messages:
        return False
    columns = [
        value for value in prompt.metadata.values() if isinstance(value, Sequence) and not isinstance(value, str)
    ]
    return any(_same_message(value[-1], prompt.messages[-1]) for value in columns if len(value))


def _same_message(value: Any, message: Mapping[str, Any]) -> bool:
    return isinstance(value, Mapping) and all(value.get(key) == message.get(key) for key in ("role", "content"))


def _trl_prompt(request: RewardRequest) -> Any:
    prompt = request.prompt
    if conversational(prompt):
        return [dict(message) for message in prompt.messages]
    return prompt.messages[-1]["content"] if prompt.messages else prompt.text


def _trl_completion(request: RewardRequest) -> Any:
    return [dict(message) for message in request.completion] if conversational(request.prompt) else request.response


def _verl(request: RewardRequest) -> dict[str, Any]:
    """Returns verl's arguments for one reply; `ground_truth` is the label, or that in verl's column `reward_model`."""
    row, truth = request.prompt.metadata, request.label
    if truth is None:
        truth = row.get("reward_model")
    if isinstance(truth, Mapping) and "ground_truth" in truth:
        truth = truth["ground_truth"]
    return {
        **row,
        "data_source": row.get("data_source", request.prompt.datasource),
        "solution_str": request.response,
        "ground_truth": truth,
        "extra_info": row.get("extra_info") or {},
        "step": request.step,
    }
