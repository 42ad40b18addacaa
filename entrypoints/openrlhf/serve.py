"""Translates OpenRLHF's server of a reward model (`openrlhf.cli.serve_rm`) to `rollgrad serve reward`."""

from collections.abc import Sequence

from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED, KERNELS
from rollgrad.entrypoints.openrlhf.shared import set_format
from rollgrad.entrypoints.translation.draft import Draft, TranslatedCommand
from rollgrad.entrypoints.translation.words import options, parse

_FLAGS: dict[str, Flag] = {
    "port": Flag(Kind.INTEGER, "port"),
    "host": Flag(Kind.TEXT, "host"),
    "reward.model_name_or_path": Flag(Kind.TEXT, "model"),
    "data.max_len": Flag(Kind.INTEGER, "max_length", default=2048),
    "ds.param_dtype": Flag(Kind.TEXT),
    "batch_size": Flag(Kind.INTEGER, reason="texts that wait are scored together, up to --batch_tokens"),
    "reward.normalize_enable": Flag(Kind.SWITCH, "normalize_reward"),
    "ds.load_in_4bit": Flag(Kind.SWITCH, reason="a reward model is not quantised: --bf16 halves its memory"),
    "ds.packing_samples": Flag(Kind.SWITCH, reason=KERNELS),
    **{
        name: FLAGS[name]
        for name in ("ds.value_head_prefix", "ds.attn_implementation", "data.disable_fast_tokenizer", "use_ms")
    },
}

SERVER = Program(
    name="openrlhf.cli.serve_rm",
    flags=_FLAGS,
    names={
        **{name: (name,) for name in _FLAGS},
        **{flat: names for flat, names in FLAT.items() if set(names) <= _FLAGS.keys()},
    },
    implied={flat: implied for flat, implied in IMPLIED.items() if implied[0] in _FLAGS},
)
"""The server, and the flags of `rollgrad serve reward` that its flags become."""


def translate_server(words: Sequence[str]) -> TranslatedCommand:
    """Translates the flags of `openrlhf.cli.serve_rm`, with its defaults but for the host.

    Raises:
        ConfigurationError: the server has no such flag or value.
    """
    draft = Draft(program=SERVER, options=options(SERVER, parse(words)))
    for name in dict.fromkeys((*draft.options, *_FLAGS)):
        draft.follow(name)
    set_format(draft)
    draft.changed.append("of a text longer than --max_length the end is scored, in OpenRLHF the beginning")
    host = draft.value("host")
    if host is None:
        draft.changed.append("it listens on 127.0.0.1 without --host, in OpenRLHF on all interfaces")
    elif host != "127.0.0.1":
        draft.change("host", "clients need a token, see --token_file")
    return TranslatedCommand(["serve", "reward", *draft.words()], draft.notes)
