"""Translates what `trl sft`, `dpo`, `kto` and `reward` have of their own: rows of examples, and losses."""

from collections.abc import Sequence

from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.translation.draft import Draft
from rollgrad.entrypoints.trl.moving_reference import MOVING, follow_policy

OLDER_LOSSES = {"aot_pair": "aot"}
"""Losses of pairs that earlier releases of TRL called otherwise."""

UNLIKE = "pairs of equal replies, and those with an empty one, are left out and counted, in TRL trained"
"""The note on pairs that nothing can be learnt from."""

ENDED = "of messages nothing after the token that ends a turn is learned, in TRL what the template writes there, too"
"""The note on the line break that most templates write after a reply, by which log-probs of replies differ."""


def _rows(draft: Draft, dataset: str | None, *, cut: bool) -> None:
    if dataset is not None:
        draft.set("data.dataset", dataset)
    if "dataset_train_split" in draft.options:
        draft.set("data.split", draft.value("dataset_train_split"))
    if cut:
        draft.set("data.overlong", "cut")
    if "chat_template_path" in draft.options:
        draft.change("chat_template_path", "renders prompts and completions that are texts too, in TRL messages alone")
    else:
        draft.set("data.apply_chat_template", False)  # to texts, as in TRL; messages are always rendered


def finish_sft(draft: Draft, dataset: str | None) -> None:
    """Sets `data` and `train.loss` of a run on the `dataset`.

    Raises:
        ConfigurationError: there is no such loss.
    """
    _rows(draft, dataset, cut=True)
    field = draft.value("dataset_text_field")
    if field not in (None, "text"):
        draft.set("data.format", "text")
        draft.set("data.input_key", field)
    completion, assistant = draft.value("completion_only_loss"), draft.value("assistant_only_loss", False)
    if completion is False:
        draft.set("data.train_on", "all")
    elif completion:
        draft.set("data.train_on", "completion")
    elif not assistant:
        draft.changed.append(
            "of conversations the replies are trained, in TRL without --assistant_only_loss all tokens"
        )
    if completion is not False and not assistant:  # with `assistant`, marks in the template say where a reply ends
        draft.changed.append(ENDED)
    if draft.value("loss_type") == "chunked_nll":  # an older name of it
        draft.set("train.loss", "nll")
    else:
        _choice(draft, "loss_type", ("nll", "dft"))


def finish_dpo(draft: Draft, dataset: str | None) -> None:
    """Sets `data` and `dpo` of a run on the `dataset`."""
    _rows(draft, dataset, cut=True)
    draft.changed.extend((UNLIKE, ENDED))
    losses = [OLDER_LOSSES.get(loss, loss) for loss in draft.value("loss_type", ["sigmoid"])]
    draft.set("dpo.loss", losses)
    if "sft" in losses:
        draft.changed.append(
            "the loss sft is the mean over the tokens of the chosen replies of a step, in TRL of a micro-batch"
        )
    if draft.value("use_weighting", False) and "sft" in losses and len(losses) > 1:
        draft.change("use_weighting", "the likelihood of the chosen replies is not weighed, in TRL by the mean weight")
    if losses == ["sft"]:
        for name in ("beta", "ld_alpha", "use_weighting", *MOVING):
            draft.lose(name, "the loss sft alone compares no replies: rollgrad train sft learns from chosen ones, too")
    else:
        _pairs(draft)
    if "discopop" in losses and "discopop_tau" in draft.options:
        draft.set("dpo.discopop_tau", draft.value("discopop_tau"))
    else:
        draft.lose("discopop_tau", "it is of --loss_type discopop, in TRL too")
    coef = draft.value("f_alpha_divergence_coef", 0.5)
    if draft.value("f_divergence_type", "reverse_kl") == "alpha_divergence":
        draft.set("dpo.f_alpha", 1 - coef)  # TRL's is that of u^(coef - 1), ours that of u^-alpha
    elif coef != 0.5:
        draft.lose("f_alpha_divergence_coef", "the divergence is not the alpha-divergence, in TRL neither")
    smoothing = draft.value("label_smoothing", 0.0)
    if {"robust", "exo_pair", "aot", "aot_unpaired"} & set(losses):
        draft.set("dpo.label_smoothing", smoothing)
    elif smoothing:
        draft.lose("label_smoothing", f"{', '.join(losses)} does not read it, in TRL neither")


def _pairs(draft: Draft) -> None:
    """Sets what losses that compare replies read."""
    draft.set("dpo.beta", draft.value("beta"))
    for name, setting in (("ld_alpha", "dpo.ld_alpha"), ("use_weighting", "dpo.wpo")):
        if name in draft.options:
            draft.set(setting, draft.value(name))
    follow_policy(draft, "dpo")


def finish_kto(draft: Draft, dataset: str | None) -> None:
    """Sets `data` and `kto` of a run on the `dataset`.

    Raises:
        ConfigurationError: there is no such loss.
    """
    _rows(draft, dataset, cut=True)
    draft.changed.append(ENDED)
    _choice(draft, "loss_type", ("kto", "apo_zero_unpaired"))
    follow_policy(draft, "kto")
    draft.changed.append(
        "empty replies, and pairs of which one is empty or both are equal, are left out and counted, in TRL trained"
    )
    if draft.value("loss_type", "kto") == "kto":
        draft.changed.append(
            "the distance from the reference is measured over the whole step, on each prompt with the completion to "
            "another one that is before it in the step's order; in TRL over a micro-batch, with the row before it in "
            "the data, whatever its prompt"
        )


def finish_reward(draft: Draft, dataset: str | None) -> None:
    """Sets `data` of a run on the `dataset`."""
    _rows(draft, dataset, cut=False)
    draft.changed.extend((UNLIKE, ENDED))
    draft.changed.append("a column margin of the rows counts with rm.margin True alone, in TRL wherever there is one")


def _choice(draft: Draft, name: str, known: Sequence[str]) -> None:
    """Refuses a value that has no counterpart.

    Raises:
        ConfigurationError: it is one.
    """
    value = draft.value(name, known[0])
    if value not in known:
        raise ConfigurationError(f"--{name} is {value}, but there are {' and '.join(known)}: change --{name}.")
