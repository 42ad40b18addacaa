"""Translates OpenRLHF's trainers over examples to settings of `rollgrad train sft`, `train dpo` and the others.

Flags with a counterpart of the same meaning, and those without one, are in `names.names_of_openrlhf_trainers`.
"""

from collections.abc import Callable, Mapping

from attrs import define, frozen

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.kd import KDRun
from rollgrad.application.settings.kto import KTORun
from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.prm import PRMRun
from rollgrad.application.settings.rm import RMRun
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import structure_run
from rollgrad.entrypoints.names.flags import Program
from rollgrad.entrypoints.names.names_of_openrlhf_trainers import DPO, KD, KTO, PRM, RM, SFT
from rollgrad.entrypoints.openrlhf.shared import (
    lose_zero,
    translate_adapters,
    translate_checkpoints,
    translate_optimizer,
    translate_schedule,
    translate_text,
    translate_tracking,
    translate_zero,
)
from rollgrad.entrypoints.openrlhf.words import Command
from rollgrad.entrypoints.translation.draft import Draft, TranslatedRun
from rollgrad.entrypoints.translation.words import options, parse

ONE_PROCESS = "a single process divides nothing"


@define(kw_only=True)
class ExamplesDraft(Draft):
    """A translation in progress of a trainer over examples."""

    command: Command
    """The command with its launcher."""


@frozen
class Trainer:
    """A trainer over examples: its `program`, the class of our `run`, and what translates flags that depend on each
    other."""

    program: Program
    run: type[OfflineRun]
    finish: Callable[[Draft], None]


def translate_trainer(command: Command) -> TranslatedRun:
    """Translates the command of a trainer over examples, with OpenRLHF's defaults.

    Raises:
        ConfigurationError: OpenRLHF has no such flag or value.
    """
    trainer = TRAINERS[command.module]
    draft = ExamplesDraft(
        program=trainer.program, options=options(trainer.program, parse(command.flags)), command=command
    )
    for name in dict.fromkeys((*draft.options, *trainer.program.flags)):
        draft.follow(name)
    translate_checkpoints(draft)
    translate_optimizer(draft, "actor")
    translate_schedule(draft, "actor")
    translate_adapters(draft)
    translate_text(draft)
    translate_tracking(draft)
    _rows(draft)
    _evaluation(draft)
    _processes(draft)
    trainer.finish(draft)
    if draft.value("ds.lora.rank", 0):
        draft.change(
            "ds.lora.rank", "the model is saved with adapters merged, and in adapter below it the adapters alone"
        )
    run = structure_run(trainer.run, draft.settings)
    return TranslatedRun(f"train {command.module.removeprefix('train_')}", run, draft.notes)


def _rows(draft: Draft) -> None:
    if draft.program is RM:
        draft.change("data.max_len", "a longer pair is dropped, in OpenRLHF cut, and judged by a token in its middle")
    else:
        draft.set("data.overlong", "cut")
        draft.change("data.max_len", "no end is put where a longer example is cut, in OpenRLHF the end of sequence")
    probs = draft.value("data.dataset_probs")
    if probs and "," in str(draft.value("data.dataset", "")):
        draft.set("data.probs", probs)


def _evaluation(draft: Draft) -> None:
    dataset, steps = draft.value("eval.dataset"), draft.value("eval.steps", -1)
    if not dataset:
        for key in ("split", "steps"):
            if key != "steps" or steps != -1:
                draft.lose(f"eval.{key}", "there is nothing to evaluate on without --eval_dataset")
        return
    draft.set("eval.dataset", dataset)
    draft.set("eval.split", draft.value("eval.split"))
    draft.set("eval.steps", steps)
    often = "in OpenRLHF after every epoch" if steps == -1 else "and in between as asked"
    draft.change("eval.dataset", f"evaluates before and after training, {often}")


def _processes(draft: ExamplesDraft) -> None:
    """Translates the processes. OpenRLHF has one on every GPU of the machine unless its launcher says how many."""
    sequence, tensor = draft.value("ds.ring_attn_size", 1), draft.value("ds.tensor_parallel_size", 1)
    launched = draft.command
    count = sequence * tensor if launched.processes is None else launched.processes
    if count * launched.machines == 1:
        if launched.processes is None:
            draft.changed.append(
                "one process trains, in OpenRLHF one on every GPU of the machine: write deepspeed --num_gpus N for N"
            )
        for name in ("ds.zero_stage", "ds.adam_offload"):
            draft.lose(name, ONE_PROCESS)
        for name in ("ds.ring_attn_size", "ds.tensor_parallel_size"):
            if draft.asks(name):
                draft.lose(name, ONE_PROCESS)
        lose_zero(draft)
        return
    draft.set("cluster.enable", True)
    draft.set("actor.num_nodes", launched.machines)
    draft.set("actor.num_gpus_per_node", count)
    draft.set("ds.sequence_parallel_size", sequence)
    draft.set("ds.tensor_parallel_size", tensor)
    draft.set("ds.zero_stage", draft.value("ds.zero_stage", 2))
    draft.set("ds.adam_offload", draft.value("ds.adam_offload", False))
    translate_zero(draft)


def _finish_demonstrations(draft: Draft) -> None:
    key = draft.value("data.input_key")
    if draft.value("pretrain_mode_enable", False):
        draft.set("data.format", "text")
        draft.set("data.apply_chat_template", False)
        for setting in ("input_template", "output_key"):
            draft.settings["data"].pop(setting, None)
        for name in ("data.output_key", "data.multiturn", "data.apply_chat_template", "data.input_template"):
            draft.lose(name, f"with --pretrain_mode all of the column {key} is trained, in OpenRLHF too")
    elif not draft.value("data.output_key"):
        draft.set("data.train_on", "assistant" if draft.value("data.multiturn", False) else "last")
    else:
        draft.lose("data.multiturn", f"all of --output_key is trained after each {key}")


def _finish_dpo(draft: Draft) -> None:
    ipo, smoothing = draft.value("ipo_enable", False), draft.value("label_smoothing", 0.0)
    imitation = draft.value("nll_loss_coef", 0.0)
    loss = "ipo_sum" if ipo else "sigmoid"
    if ipo and smoothing:
        draft.lose("label_smoothing", "--ipo has no labels to smooth, in OpenRLHF neither")
    else:
        draft.set("dpo.label_smoothing", smoothing)
    if imitation:
        draft.set("dpo.loss", [loss, "sft"])
        draft.set("dpo.loss_weights", [1.0, imitation])
        draft.change(
            "nll_loss_coef", "the mean over all chosen tokens of a step, in OpenRLHF over pairs of their means"
        )
    else:
        draft.set("dpo.loss", [loss])


SCORED_PAIRS = 512
"""Pairs of the data itself whose scores a reward model is centred and scaled by, where none are held out."""


def _finish_rm(draft: Draft) -> None:
    loss = draft.value("loss_type", "sigmoid")
    if loss == "logexp":
        draft.change("loss_type", "it is the sigmoid loss, here with the margin too")
    elif loss != "sigmoid":
        given = draft.options["loss_type"]
        raise ConfigurationError(f"{loss} is none of sigmoid, logexp: change {given.flag}.")
    if draft.value("eval.dataset") is None:
        data = draft.settings["data"]
        draft.set("eval.dataset", data["dataset"])
        draft.set("eval.split", data.get("split", "train"))
        draft.set("eval.max_samples", SCORED_PAIRS)
        draft.changed.append(
            "without --eval_dataset mean and standard deviation of scores, for --normalize_reward, are of "
            f"{SCORED_PAIRS} pairs of the data, in OpenRLHF of a hundredth of them"
        )


def _finish_prm(draft: Draft) -> None:
    tokens = draft.value("reward_tokens")
    if draft.value("placeholder_token") is None:
        draft.changed.append("without --placeholder_token a row has a prompt, and its steps as a list")
    if tokens is None:
        draft.changed.append("steps are judged by the tokens + and -, in OpenRLHF by the whole vocabulary")
    elif len(tokens) == 2:
        draft.set("prm.reward_tokens", list(tokens))
    else:
        raise ConfigurationError(
            f"--reward_tokens has {len(tokens)} tokens: here steps are right or wrong, so name the token for right and "
            "the one for wrong."
        )


def _finish_kto(draft: Draft) -> None:
    draft.changed.append("replies are compared with a distance over the whole step, in OpenRLHF over a micro-batch")


TRAINERS: Mapping[str, Trainer] = {
    "train_sft": Trainer(SFT, SFTRun, _finish_demonstrations),
    "train_dpo": Trainer(DPO, DPORun, _finish_dpo),
    "train_rm": Trainer(RM, RMRun, _finish_rm),
    "train_prm": Trainer(PRM, PRMRun, _finish_prm),
    "train_kto": Trainer(KTO, KTORun, _finish_kto),
    "train_kd": Trainer(KD, KDRun, _finish_demonstrations),
}
"""By the module of OpenRLHF."""
