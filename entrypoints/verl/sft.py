"""Translates verl's supervised fine-tuning to settings of `rollgrad train sft`."""

from rollgrad.application.settings.sft import SFTRun
from rollgrad.entrypoints.config_io import structure_run
from rollgrad.entrypoints.names.names_of_verl_sft import SFT
from rollgrad.entrypoints.translation.draft import TranslatedRun
from rollgrad.entrypoints.verl.algorithm import translate_adapters, translate_optimizer
from rollgrad.entrypoints.verl.draft import VerlDraft, read_draft
from rollgrad.entrypoints.verl.run import (
    files,
    period,
    translate_files,
    translate_length,
    translate_template,
    translate_tracking,
)
from rollgrad.entrypoints.verl.words import Command

SEQUENCE = "engine.ulysses_sequence_parallel_size"


def translate_sft(command: Command) -> TranslatedRun:
    """Translates a command of one of the two trainers.

    Raises:
        ConfigurationError: verl has no such setting or value.
    """
    draft = read_draft(VerlDraft, command, SFT[command.module.removesuffix("_ray")])
    for name in dict.fromkeys((*draft.options, *draft.program.flags)):
        draft.follow(name)
    _rows(draft)
    translate_template(draft)
    translate_optimizer(draft, "", "actor")
    translate_adapters(draft, "model")
    translate_length(draft, epochs="train.num_epochs")
    _passes(draft)
    _evaluation(draft)
    _processes(draft, command)
    translate_files(draft)
    translate_tracking(draft)
    return TranslatedRun("train sft", structure_run(SFTRun, draft.settings), draft.notes)


def _column(draft: VerlDraft, what: str) -> str:
    """Returns a column of prompts or replies; a key within it comes behind a dot."""
    key, inner = draft.value(f"data.{what}_key"), draft.value(f"data.{what}_dict_keys")
    return f"{key}.{'.'.join(inner)}" if inner else str(key)


def _rows(draft: VerlDraft) -> None:
    dataset = files(draft, "data.train_files")
    if dataset is not None:
        draft.set("data.dataset", dataset)
    if (most := draft.value("data.train_max_samples", -1)) is not None and most > 0:
        draft.set("data.max_samples", most)
    if draft.value("data.multiturn.enable"):
        draft.set("data.format", "messages")
        draft.set("data.input_key", draft.value("data.messages_key"))
        for what in ("prompt", "response"):
            for name in (f"data.{what}_key", f"data.{what}_dict_keys"):
                draft.lose(name, "rows are conversations, in verl too")
    else:
        draft.set("data.format", "prompt_completion")
        draft.set("data.input_key", _column(draft, "prompt"))
        draft.set("data.output_key", _column(draft, "response"))
        draft.lose("data.messages_key", "rows have a prompt and a reply, in verl too, without data.multiturn.enable")
    cut = draft.value("data.truncation")
    draft.set("data.overlong", "error" if cut == "error" else "cut")
    if cut == "left":
        draft.change("data.truncation", "the beginning of a longer example is kept, in verl its end")


def _passes(draft: VerlDraft) -> None:
    tokens = "data.max_token_len_per_gpu"
    if not draft.value("data.use_dynamic_bsz"):
        draft.lose(tokens, "verl reads it with data.use_dynamic_bsz only")
    elif tokens in draft.options:
        draft.set("train.max_tokens_per_micro_batch", draft.value(tokens))


def _evaluation(draft: VerlDraft) -> None:
    dataset = files(draft, "data.val_files")
    if dataset is None:
        for name in ("trainer.test_freq", "data.val_max_samples"):
            if draft.asks(name) and draft.options[name].values != ("-1",):
                draft.lose(name, "there is nothing to evaluate on without data.val_files")
        return
    draft.set("eval.dataset", dataset)
    draft.set("eval.steps", period(draft, "trainer.test_freq"))
    if (most := draft.value("data.val_max_samples", -1)) is not None and most > 0:
        draft.set("eval.max_samples", most)


def _processes(draft: VerlDraft, command: Command) -> None:
    """Translates the processes, as many as the launcher starts."""
    machines = draft.positive("trainer.nnodes") if command.processes is None else command.machines
    each = draft.positive("trainer.n_gpus_per_node") if command.processes is None else command.processes
    if machines * each == 1:
        for name in ("engine.offload_policy", "engine.strategy", SEQUENCE):
            if draft.asks(name) and draft.options[name].values != ("1",):
                draft.lose(name, "one process trains")
        return
    draft.set("cluster.enable", True)
    draft.set("cluster.strategy", "fsdp2")
    draft.set("actor.num_nodes", machines)
    draft.set("actor.num_gpus_per_node", each)
    if draft.submitted:
        draft.set("cluster.address", "auto")
    if draft.value("engine.strategy") not in (None, "fsdp", "fsdp2"):
        draft.change("engine.strategy", "FSDP2 divides the model")
    draft.set("ds.sequence_parallel_size", draft.positive(SEQUENCE))
    if draft.asks("engine.offload_policy"):
        draft.set("cluster.offload", True)
