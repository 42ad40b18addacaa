"""JSON schema and validator of a function's arguments, from its signature and docstring.

Does not own: calling the function.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

from rollgrad.application.foreign import first_line
from rollgrad.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_PROBLEMS = 5
"""Largest number of problems in a message: enough to correct a call, too few to fill the context."""
_SECTION = re.compile(
    r"(args|arguments|parameters|returns?|yields?|raises|examples?|notes?|attributes|warnings?|todo|see also):\s*$",
    re.IGNORECASE,
)
_ARGUMENT = re.compile(r"\*{0,2}(?P<name>\w+)\s*(\([^)]*\))?:\s*(?P<text>.*)")


class FunctionArguments:
    """The arguments of `function`, which error messages call `tool`.

    Raises:
        ConfigurationError: an argument cannot be given by name, or its type has no JSON schema.
    """

    def __init__(self, function: Callable[..., Any], tool: str) -> None:
        from pydantic.errors import PydanticUserError

        self._tool = tool
        try:
            self._names, self._model = _model(function, tool)
            self.schema: Mapping[str, Any] = _schema(self._model)
        except (PydanticUserError, NameError, TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"The tool {tool!r} has an argument that no JSON schema describes ({first_line(error)}): annotate its "
                "arguments with JSON types, dataclasses or pydantic models."
            ) from error

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the validated and coerced arguments, without those left out, whose defaults the function has.

        Raises:
            ValueError: arguments are wrong; the message is for the model.
        """
        from pydantic import ValidationError

        try:
            values = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            problems = [self._describe(problem) for problem in error.errors(include_url=False, include_input=False)]
            told = "; ".join(problems[:MAX_PROBLEMS])
            raise ValueError(f"The arguments of {self._tool!r} are wrong: {told}.") from None
        return {self._names[field]: getattr(values, field) for field in self._names if field in values.model_fields_set}

    def _describe(self, problem: Any) -> str:
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            return f"`{where}` is unknown"
        return f"`{where}` is missing" if problem["type"] == "missing" else f"`{where}`: {problem['msg']}"


def summary(function: Callable[..., Any]) -> str:
    """Returns a docstring up to its first section (`Args:`, `Returns:`, ...)."""
    lines = (inspect.getdoc(function) or "").splitlines()
    end = next((n for n, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    return "\n".join(lines[:end]).strip()


def argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the descriptions of arguments in the `Args:` section of a Google-style docstring."""
    texts: dict[str, str] = {}
    margin: int | None = None
    inside, name = False, ""
    for line in (inspect.getdoc(function) or "").splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            inside = bool(re.match(r"(args|arguments|parameters):\s*$", line, re.IGNORECASE))
            margin = None
        elif inside and line.strip():
            margin = indent if margin is None else margin
            found = _ARGUMENT.match(line.strip()) if indent <= margin else None
            if found:
                name = found["name"]
                texts[name] = found["text"]
            elif name:  # a description continues
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts


def _model(function: Callable[..., Any], tool: str) -> tuple[dict[str, str], type["BaseModel"]]:
    """Returns a model with an alias for every argument, because a field may not be called `copy` or `_x`."""
    from pydantic import ConfigDict, Field, create_model

    owner = function if inspect.isroutine(function) or inspect.isclass(function) else function.__call__  # type: ignore[operator]
    hints = get_type_hints(getattr(function, "func", owner), include_extras=True)
    texts = argument_texts(function)
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigurationError(
                f"The tool {tool!r} takes {parameter}, but a model gives every argument by its name: write the "
                "arguments out, without *, ** and /."
            )
        names[field := f"argument_{number}"] = parameter.name
        default = ... if parameter.default is parameter.empty else parameter.default
        told: dict[str, Any] = {"description": texts[parameter.name]} if parameter.name in texts else {}
        fields[field] = (hints.get(parameter.name, Any), Field(default=default, alias=parameter.name, **told))
    return names, create_model(tool, __config__=ConfigDict(extra="forbid"), **fields)


def _schema(model: type["BaseModel"]) -> dict[str, Any]:
    """Returns the model's schema without titles, which would repeat names and cost tokens."""
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    schema = model.model_json_schema(schema_generator=Untitled)
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return schema
