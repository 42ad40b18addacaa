"""Every flag that a message, docstring, document or example names is one that a command takes, in its one spelling."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.settings import FREE
from rollgrad.entrypoints.cli.parsing import TrainArguments, flag_kinds, parse_run
from rollgrad.entrypoints.names.names_of_openrlhf import FLAGS, FLAT, IMPLIED
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS
from rollgrad.entrypoints.openrlhf.examples import TRAINERS
from rollgrad.entrypoints.openrlhf.inference import INFERENCE
from tests.flags import EVERY, example, negative

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(
    path
    for folder, patterns in {
        ".": ("README.md",),
        "docs": ("*.md",),
        "examples": ("**/*.py", "**/*.sh", "**/*.yaml"),
        **dict.fromkeys(("application", "adapters", "domain", "entrypoints", "rollgrad"), ("**/*.py",)),
    }.items()
    for pattern in patterns
    for path in (ROOT / folder).glob(pattern)
)

OURS = {*EVERY, *(negative(name) for name, kind in EVERY.items() if kind is bool), "help", "version", "run"}
FREE_FLAGS = tuple(f"{name}." for name, kind in EVERY.items() if kind == FREE)
"""Beginnings of flags whose names a library defines."""

OPENRLHF = {
    *FLAT,
    *FLAGS,
    *IMPLIED,
    *(name for trainer in TRAINERS.values() for name in trainer.program.names),
    *INFERENCE.names,
}
TRL = {name for program in COMMANDS.values() for name in program.names}
OPENRLHF_FILES = re.compile(r"openrlhf|translation|trl|migration\.md|redaction\.py")
"""Files that speak of OpenRLHF's flags; elsewhere they would be mistaken for ours."""

PLACEHOLDERS = {"flag", "name", "section.flag", "section.no_flag", "SECTION.SETTING"}

FOREIGN = {
    *("address", "head", "block", "filter", "temp-dir"),  # Ray
    *("exclude", "exclusive", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node"),  # Slurm
    *("cpus-per-task", "job-name", "time", "signal", "batch", "runtime-env-json"),
    *("shm-size", "ipc", "cap-add", "security-opt", "pid"),  # Docker, py-spy
    *("no-deps", "constraint", "index-url", "module", "num_gpus", "config_file"),  # pip, deepspeed, accelerate
    *(
        "enable-scale-out",
        "api-key",
        "logprobs-mode",
        "weight-transfer-config",
        "generate",
        "max-num-seqs",
        "max-logprobs",
        "structured-outputs-config",
        "speculative-config",
    ),  # vLLM
    *("no-enable-chunked-prefill", "max-num-batched-tokens", "kv-cache-memory-bytes"),
    *("query-gpu", "format"),  # nvidia-smi
    *("variant", "include"),  # debootstrap
    "newest",  # scripts/model_table.py
    *("shots", "seconds", "lora-rank", "smoke", "only", "rows", "longest", "pairs"),  # the benchmarks, by tyro
    *("config-path", "config-dir", "config-name"),  # Hydra
    *("ink", "soft", "line", "ground", "card"),  # names of colours in a style sheet
}
"""Flags of other tools, and of the benchmarks."""

HOLE = "\0"
"""Stands for what a formatted text inserts."""

FLAG = re.compile(r"(?<![\w-])--([a-zA-Z][\w-]*(?:\.\w[\w-]*)*)(\.?[*\0<{\[]|\.\.\.)?")


def texts(path: Path) -> Iterator[str]:
    """Returns the words that a reader of the file sees: all of it, or the texts in a program."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    inserted = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            inserted.update(map(id, node.values))
            parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inserted:
            yield node.value


@cache
def flags(path: Path) -> list[tuple[str, bool]]:
    """The flags in a file; whether it is only the beginning of one (`--critic.*`)."""
    return [(match[1], match[2] is not None) for text in texts(path) for match in FLAG.finditer(text)]


def wrong(path: Path) -> Iterator[str]:
    where = path.relative_to(ROOT).as_posix()
    for name, begins in flags(path):
        plain = name.replace("-", "_")
        if begins:
            if not any(known.startswith(plain) for known in OURS):
                yield f"--{name}... begins no flag"
        elif name in FOREIGN or name in PLACEHOLDERS or (name in OPENRLHF | TRL and OPENRLHF_FILES.search(where)):
            continue
        elif plain not in OURS and not plain.startswith(FREE_FLAGS):
            yield f"--{name} is a flag of no command"
        elif name != plain:
            yield f"--{name} is spelled with hyphens"


def test_every_flag_is_one_of_ours() -> None:
    found = {str(path.relative_to(ROOT)): list(wrong(path)) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_files_are_found() -> None:
    found = {name for path in FILES for name, begins in flags(path) if not begins}
    assert {"data.apply_chat_template", "actor.model_name_or_path", "config"} <= found
    assert len(found & OURS) > 100


def test_the_parser_takes_every_flag_that_is_named() -> None:
    named = {name.replace("-", "_") for path in FILES for name, begins in flags(path) if not begins}
    kinds = flag_kinds(TrainArguments)
    words = [
        word
        for name in sorted(named & kinds.keys() - {"config", "algo.preset", "algo.extension_path"})
        for word in (f"--{name}", *example(kinds[name]))
    ]
    assert len(words) > 200
    assert parse_run(TrainArguments, RLConfig, "train rl", words)[2] == []
