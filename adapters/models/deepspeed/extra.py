"""Keys of DeepSpeed's configuration that `ds.extra` may set, by what DeepSpeed itself reads."""

import difflib
import importlib.util
from collections.abc import Collection, Iterator, KeysView, Mapping
from typing import Any

PRECISION = "set --actor.dtype"
BATCHES = "set --train.batch_size and --train.max_tokens_per_micro_batch"
ALWAYS = "the optimizer that rollgrad gives to DeepSpeed needs its value"

OWN: Mapping[str, str] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), BATCHES),
    **dict.fromkeys(("fp16", "bf16", "torch_autocast"), PRECISION),
    **dict.fromkeys(
        ("managed_gradient_accumulation", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), ALWAYS
    ),
    "compile.deepcompile": "DeepCompile takes neither a varying number of passes nor passes of unlike sizes",
    "gradient_allreduce_op": "losses are scaled so that the mean of all processes' gradients is the batch's",
    "gradient_clipping": "set --actor.max_norm",
    "optimizer": "set --actor.optim",
    "scheduler": "set --actor.lr_scheduler",
    "tensor_parallel": "set --ds.tensor_parallel_size",
    "sequence_parallel_size": "set --ds.sequence_parallel_size",
    "zero_optimization.stage": "set --ds.zero_stage",
    "zero_optimization.offload_optimizer": "set --ds.adam_offload",
    "zero_optimization.offload_param": "set --ds.param_offload",
    "zero_optimization.cpu_offload": "set --ds.adam_offload",
    "zero_optimization.cpu_offload_param": "set --ds.param_offload",
}
"""Keys that rollgrad sets itself, and what to do instead."""

ENDED = "Extra inputs are not permitted"
"""pydantic's words for a key that a section does not have."""


def config_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each key in `ds.extra` that DeepSpeed does not read, or that another setting sets; if there
    is none, a sentence for the first value that DeepSpeed refuses. Without an installed DeepSpeed nothing is
    checked."""
    wrong = [
        f"ds.extra.{name} is not yours to set: {instead}, and leave --ds.extra.{name} out."
        for name, instead in OWN.items()
        if _holds(extra, name.split("."))
    ]
    zero = extra.get("zero_optimization", {})
    if not isinstance(zero, Mapping):  # DeepSpeed would take it for the stage, in place of the whole section
        wrong.append(
            f"ds.extra.zero_optimization is {zero!r}, but it must be a section: set --ds.zero_stage, or write "
            "--ds.extra.zero_optimization.NAME VALUE."
        )
    yield from wrong
    if wrong or not extra or importlib.util.find_spec("deepspeed") is None:
        return
    empty = _Read({})
    _let_read(empty)
    unknown = [name for name in extra if name not in empty.read]
    for name in unknown:
        yield _unknown(name, empty.read)
    if unknown:
        return
    given = _Read(extra)
    try:
        _let_read(given)
    except Exception as error:  # pydantic's, or any of a dozen kinds
        yield _refusal(error)
    else:
        yield from (_unknown(name, known) for name, known in given.unread(""))


def merged(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DeepSpeed's configuration with the keys of `extra` in place of its own, section by section."""
    result = dict(config)
    for key, value in extra.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return result


class _Read(dict[str, Any]):
    """A configuration that notes which of its keys are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: _Read(v) if isinstance(v, Mapping) else v for name, v in values.items()})
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self)  # its `in` calls `__contains__`

    def __iter__(self) -> Iterator[str]:  # without one of its own, what unpacks it reads no key
        return super().__iter__()

    def __copy__(self) -> "_Read":
        return self

    def unread(self, above: str) -> Iterator[tuple[str, Collection[str]]]:
        """Yields keys that were not read, and those of their section that were. What reads a section without a look at
        any of its keys is pydantic, which refuses unknown ones itself."""
        for name, value in self.items():
            if name not in self.read:
                yield f"{above}{name}", {f"{above}{other}" for other in self.read}
            elif isinstance(value, _Read) and value.read:
                yield from value.unread(f"{above}{name}.")


def _let_read(config: _Read) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DtypeEnum

    config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed reads no configuration without it
    numbers = DeepSpeedConfig(config).grad_accum_dtype
    if numbers is not None:
        DtypeEnum(numbers)  # else refused when the models have been loaded


def _holds(extra: Mapping[str, Any], path: list[str]) -> bool:
    value: Any = extra
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def _unknown(name: str, known: Collection[str]) -> str:
    similar = difflib.get_close_matches(name, [key for key in known if key not in OWN], n=1)
    hint = f"did you mean --ds.extra.{similar[0]}?" if similar else "see the documents of DeepSpeed's configuration."
    return f"ds.extra.{name} is no key of the DeepSpeed that is installed; {hint}"


def _refusal(error: Exception) -> str:
    """Returns the sentence about an error of DeepSpeed's."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    refused: Any = error  # pydantic's, if it has `errors`
    if not hasattr(refused, "errors"):
        return f"DeepSpeed refuses ds.extra: {error}"
    first = refused.errors()[0]
    name, kinds = ".".join(map(str, first["loc"])), [DeepSpeedConfigModel]
    while kinds and kinds[0].__name__ != refused.title:
        kinds = [*kinds[0].__subclasses__(), *kinds[1:]]
    if first["msg"] != ENDED or not kinds:
        return f"DeepSpeed refuses ds.extra: {name} is {first['input']!r}: {first['msg']} ({refused.title})."
    similar = difflib.get_close_matches(name, kinds[0].model_fields, n=1) if len(first["loc"]) == 1 else []
    hint = f"; did you mean {similar[0]}?" if similar else "."
    return f"ds.extra has {name}, which is no key of DeepSpeed's {refused.title}{hint}"
