"""Settings of preference runs: each changes something, or is refused in one sentence."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from attrs import evolve, fields

from rollgrad.application.settings.dpo import DPORun, PreferenceModelConfig, dpo_errors
from rollgrad.application.settings.rules.examples import sft_errors
from rollgrad.application.settings.sections.examples import (
    ExampleDataConfig,
    ExampleFormat,
    PairDataConfig,
    RankedReplies,
)
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.ref import RefConfig
from rollgrad.application.settings.sft import SFTRun, SupervisedModelConfig
from rollgrad.domain.algorithms.preference_settings import FDivergence, PreferenceSettings
from rollgrad.domain.settings import SettingMetadata
from rollgrad.entrypoints.composition.models import make_optimizer

RUN = DPORun(actor=PreferenceModelConfig(model_name_or_path="m"), data=PairDataConfig(dataset="pairs.jsonl"))


def sentences(run: DPORun) -> list[str]:
    return [str(error) for error in dpo_errors(run)]


def test_a_run_with_a_model_and_pairs_is_right() -> None:
    assert sentences(RUN) == []
    assert RUN.dpo.mixture == {"sigmoid": 1.0}
    mpo = PreferenceSettings(loss=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0), beta=0.2)
    assert sentences(evolve(RUN, dpo=mpo)) == []
    assert mpo.mixture == {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}


@pytest.mark.parametrize(
    ("dpo", "said"),
    [
        ({"loss": ("dpo",)}, r"dpo.loss names dpo, but the losses are sigmoid, .* and sft"),
        ({"loss": ()}, "at least one name"),
        ({"loss": ("ipo", "ipo")}, "each once"),
        ({"loss_weights": (1.0, 2.0)}, "2 numbers for 1 losses"),
        ({"loss_weights": (0.0,)}, "all 0"),
        ({"loss_weights": (-1.0,)}, "at least 0"),
        ({"beta": 0.0}, "greater than 0"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"loss": ("ipo",), "label_smoothing": 0.1}, "none of the losses ipo reads it.*sigmoid, robust"),
        ({"simpo_gamma": 0.5}, "reads it.*simpo"),
        ({"discopop_tau": 0.5}, "reads it.*discopop"),
        ({"ld_alpha": 1.5}, "from 0 to 1"),
        ({"loss": ("exo_pair",)}, "set --dpo.label_smoothing"),
        ({"loss": ("sft",), "beta": 0.1}, "compares no replies"),
        ({"loss": ("hinge", "apo_zero"), "f_divergence": FDivergence.JS}, "which apo_zero does not read"),
        ({"f_alpha": 0.3}, "leave --dpo.f_alpha out, or set --dpo.f_divergence alpha_divergence"),
        ({"loss": ("sft",), "wpo": True}, "leave --dpo.wpo out"),
        ({"loss": ("sigmoid", "aot"), "wpo": True}, "leave --dpo.wpo out, or change --dpo.loss"),
    ],
)
def test_settings_of_the_loss_that_cannot_be(dpo: dict[str, Any], said: str) -> None:
    (sentence,) = sentences(evolve(RUN, dpo=PreferenceSettings(**dpo)))
    assert re.search(said, sentence), sentence


def test_pairs_of_ranks_are_not_those_of_named_columns() -> None:
    (sentence,) = sentences(evolve(RUN, data=evolve(RUN.data, pairs=RankedReplies.ALL, chosen_key="better")))
    assert re.search(r"data\.pairs .*leave --data\.chosen_key", sentence), sentence


def test_a_reference_that_nobody_reads_is_refused() -> None:
    named = evolve(RUN, ref=RefConfig(model_name_or_path="r"))
    assert sentences(named) == []
    (sentence,) = sentences(evolve(named, dpo=PreferenceSettings(loss=("simpo", "sft"))))
    assert "compares with no reference" in sentence


def test_all_problems_are_named_together() -> None:
    found = sentences(DPORun(dpo=PreferenceSettings(loss=("what",), beta=-1.0)))
    assert [sentence.split()[0] for sentence in found] == ["dpo.beta", "No", "dpo.loss", "No"]


@pytest.mark.parametrize(
    ("kind", "full", "adapters"),
    [(SupervisedModelConfig, "1e-5", "2e-4"), (PreferenceModelConfig, "5e-7", "5e-6")],
)
def test_adapters_have_a_higher_learning_rate_unless_one_is_set(kind: Any, full: str, adapters: str) -> None:
    actor = kind(model_name_or_path="m")
    assert (
        f"default: {full}, with adapters (lora.rank above 0) {adapters}."
        in SettingMetadata.of(fields(type(actor.adam)).lr).doc
    )
    assert make_optimizer(actor, 10).lr == float(full)
    actor.lora.rank = 8
    assert make_optimizer(actor, 10).lr == float(adapters)
    actor.adam.lr = 0.0
    assert make_optimizer(actor, 10).lr == 0.0


def test_samples_of_a_run_that_has_none_are_refused() -> None:
    run = evolve(RUN, logger=LoggerConfig(log_samples=3))
    (sentence,) = sentences(run)
    assert sentence.startswith("logger.log_samples is 3, but nothing is sampled in this run")


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        (ExampleFormat.PAIRS, "train dpo"),
        (ExampleFormat.UNPAIRED, "train kto"),
        (ExampleFormat.STEPS, "train prm"),
    ],
)
def test_what_other_trainers_learn_from_is_not_imitated(kind: ExampleFormat, trainer: str) -> None:
    run = SFTRun(
        actor=SupervisedModelConfig(model_name_or_path="m"),
        data=ExampleDataConfig(dataset="a.jsonl", format=kind),
    )
    (error,) = sft_errors(run)
    assert trainer in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: setattr(run.dpo, "loss", ("simpo",)), "simpo compares with no reference"),
        (lambda run: setattr(run.ref, "model_name_or_path", "other"), "begins as the policy"),
        (lambda run: setattr(run.train, "enable_ema", True), "one average of the weights is kept"),
    ],
)
def test_what_a_reference_that_moves_does_not_go_with(change: Callable[[DPORun], None], said: str) -> None:
    run = deepcopy(RUN)
    run.dpo.ref_sync_steps = 2
    assert sentences(run) == []
    change(run)
    assert [sentence for sentence in sentences(run) if re.search(said, sentence)], sentences(run)


@pytest.mark.parametrize(
    ("metric", "compared"),
    [
        ("eval/loss", True),
        ("eval/first/accuracy", True),
        ("eval/sigmoid_loss", True),
        ("eval/simpo_loss", False),
        ("eval/chosen_token_accuracy", False),
        ("eval/chosen_logprob", False),
    ],
)
def test_a_reference_that_moves_and_the_best_model(metric: str, compared: bool) -> None:
    run = deepcopy(RUN)
    run.eval.dataset, run.ckpt.best_metric = "held_out.jsonl", metric
    run.dpo.loss = ("sigmoid", "simpo")
    assert sentences(run) == []
    run.dpo.ref_sync_steps = 2
    assert [re.findall(r"set --ckpt\.best_metric (\S+),", sentence) for sentence in sentences(run)] == [
        ["eval/chosen_token_accuracy"]
    ] * compared


def test_held_out_data_without_a_name() -> None:
    run = deepcopy(RUN)
    run.eval.dataset = " ,"
    (sentence,) = sentences(run)
    assert "change --eval.dataset, or leave it out" in sentence


def test_how_much_a_reference_moves_needs_one_that_does() -> None:
    (sentence,) = sentences(evolve(RUN, dpo=PreferenceSettings(ref_mixup=0.5)))
    assert "set --dpo.ref_sync_steps" in sentence
