"""Translates OpenRLHF's server of a reward model (`openrlhf.cli.serve_rm`) to `rollgrad serve reward`."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED, KERNELS, Flag, Kind
from rollgrad.entrypoints.names.suggestions import nearest
from rollgrad.entrypoints.openrlhf.words import SERVER, Given, read_values

MAX_LENGTH = 2048
"""OpenRLHF's default number of tokens of a text."""

FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

SERVER_FLAGS: dict[str, Flag] = {
    "port": Flag(Kind.INTEGER, "port"),
    "host": Flag(Kind.TEXT, "host"),
    "reward.model_name_or_path": Flag(Kind.TEXT, "model"),
    "data.max_len": Flag(Kind.INTEGER, "max_length"),
    "ds.param_dtype": Flag(Kind.TEXT, "dtype"),
    "batch_size": Flag(Kind.INTEGER, reason="texts that wait are scored together, up to --batch_tokens"),
    "reward.normalize_enable": Flag(Kind.SWITCH, reason="scores are the model's own"),
    "ds.load_in_4bit": Flag(Kind.SWITCH, reason="a reward model is not quantised"),
    "ds.packing_samples": Flag(Kind.SWITCH, reason=KERNELS),
    **{
        name: FLAGS[name]
        for name in ("ds.value_head_prefix", "ds.attn_implementation", "data.disable_fast_tokenizer", "use_ms")
    },
}
"""Flags of `rollgrad serve reward`, or why there is none, by OpenRLHF's dotted name of the newer release."""


@frozen
class ServerTranslation:
    """Translation of a server. `words`: arguments of `rollgrad serve reward`. `notes`: one line for each flag without
    an identical counterpart."""

    words: list[str]
    notes: list[str]


def translate_server(flags: Sequence[Given]) -> ServerTranslation:
    """Translates the flags of `openrlhf.cli.serve_rm`, with its defaults but for the host.

    Raises:
        ConfigurationError: the server has no such flag or value.
    """
    values: dict[str, Any] = {"max_length": MAX_LENGTH}
    notes = []
    for given in flags:
        name, read = _dotted(given)
        flag = SERVER_FLAGS[name]
        value = read_values(flag, read)
        if flag.reason is not None:
            if value is not False:
                notes.append(f"not honoured: {given}: {flag.reason}")
        elif flag.to == "dtype":
            if value not in FORMATS:
                raise ConfigurationError(f"{value} is none of {', '.join(FORMATS)}: change {given.flag}.")
            values["dtype"] = FORMATS[value]
        else:
            values[str(flag.to)] = value
    notes.append("not identical: of a text longer than --max_length the end is scored, in OpenRLHF the beginning")
    if values.get("host", "127.0.0.1") != "127.0.0.1":
        notes.append(f"not identical: --host {values['host']}: clients need a token, see --token_file")
    elif "host" not in values:
        notes.append("not identical: it listens on 127.0.0.1 without --host, in OpenRLHF on all interfaces")
    return ServerTranslation([word for name, value in values.items() for word in (f"--{name}", str(value))], notes)


def _dotted(given: Given) -> tuple[str, Given]:
    """Returns the dotted name of a flag, and the flag with its value."""
    name = given.flag.removeprefix("--").replace("-", "_")
    if name in IMPLIED and IMPLIED[name][0] in SERVER_FLAGS:
        read_values(Flag(Kind.SWITCH), given)
        dotted, value = IMPLIED[name]
        return dotted, Given(given.flag, (value,), implied=True)
    (dotted, *_) = FLAT.get(name, (name,))
    if dotted in SERVER_FLAGS:
        return dotted, given
    flat = [flat for flat, dotted in FLAT.items() if dotted[0] in SERVER_FLAGS]
    suggestion = nearest(name, (*SERVER_FLAGS, *flat))
    hint = f"did you mean --{suggestion}?" if suggestion else "remove it."
    raise ConfigurationError(f"{given.flag} is not a flag of openrlhf.cli.{SERVER}; {hint}")
