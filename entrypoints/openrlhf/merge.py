"""Translates OpenRLHF's merging of adapters (`openrlhf.cli.lora_combiner`) to `rollgrad merge-lora`."""

from collections.abc import Sequence

from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.openrlhf.shared import set_format
from rollgrad.entrypoints.translation.draft import Draft, TranslatedCommand
from rollgrad.entrypoints.translation.words import options, parse

_FLAGS = {
    "model_path": Flag(Kind.TEXT, "model"),
    "lora_path": Flag(Kind.TEXT, "adapter"),
    "output_path": Flag(Kind.TEXT, "output"),
    "is_rm": Flag(Kind.SWITCH, "reward_model"),
    "ds.param_dtype": Flag(Kind.TEXT),
}

COMBINER = Program(
    name="openrlhf.cli.lora_combiner",
    flags=_FLAGS,
    names={**{name: (name,) for name in _FLAGS}, "param_dtype": ("ds.param_dtype",)},
    implied={"bf16": ("ds.param_dtype", "bf16")},
)
"""The program, and the flags of `rollgrad merge-lora` that its flags become."""


def translate_combiner(words: Sequence[str]) -> TranslatedCommand:
    """Translates the flags of `openrlhf.cli.lora_combiner`.

    Raises:
        ConfigurationError: it has no such flag or value.
    """
    draft = Draft(program=COMBINER, options=options(COMBINER, parse(words)))
    for name in _FLAGS:
        draft.follow(name)
    set_format(draft)
    draft.changed.append("a directory that is there already is refused, in OpenRLHF overwritten")
    return TranslatedCommand(["merge-lora", *draft.words()], draft.notes)
