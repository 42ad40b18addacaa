"""Flags of TRL's trainers mean the same here, or what differs is told."""

import attrs
import pytest

from rollgrad.application.settings.dpo import DPORun
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_trl_commands import COMMANDS
from rollgrad.entrypoints.trl.command import RUNS, translate_command
from tests.translated_settings import holds
from tests.trl_commands import BESIDE, LEAST, settings, translated


@pytest.mark.parametrize(
    ("command", "lr"),
    (dict.fromkeys(COMMANDS, 1e-6) | {"sft": 2e-5, "reward": 1e-4}).items(),
)
def test_the_defaults_of_trl_count(command: str, lr: float) -> None:
    expected = {
        "actor.adam.lr": lr,
        "actor.adam.betas": (0.9, 0.999),
        "actor.lr_scheduler": "linear",
        "actor.min_lr_ratio": 0.0,
        "actor.lr_warmup_ratio": 0.0,
        "train.batch_size": 8,
        "ckpt.output_dir": "trainer_output",
        "ckpt.save_steps": 500,
        "actor.dtype": "auto",
        "actor.gradient_checkpointing": "full",
    }
    if RUNS[command][1] is not RLConfig:
        expected |= {"train.num_epochs": 3, "data.max_tokens": 1024}
    assert holds(settings(command), expected)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_uploaded_to_the_repository_that_trl_takes(command: str) -> None:
    named = translated(command, "--push_to_hub", "--hub_model_id", "me/name", "--hub_strategy", "end")
    assert named.run.ckpt.push_to_hub == "me/name"
    (note,) = (note for note in named.notes if "hub" in note)
    assert note.startswith("not identical: --push_to_hub: the model is uploaded once, when the run has ended")
    for flags, said in (
        (("--push_to_hub",), "not honoured: --push_to_hub: name the repository with its owner: --hub_model_id me/name"),
        (("--hub_model_id", "me/name"), "not honoured: --hub_model_id me/name: nothing is uploaded without"),
    ):
        without = translated(command, *flags)
        assert without.run.ckpt.push_to_hub is None
        assert any(note.startswith(said) for note in without.notes)


def test_the_batch_is_that_of_all_processes() -> None:
    flags = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3", "--num_processes", "2")
    assert holds(
        settings("dpo", *flags), {"train.batch_size": 24, "cluster.enable": True, "actor.num_gpus_per_node": 2}
    )


@pytest.mark.parametrize(
    ("flags", "share", "noted"),
    [
        (("--warmup_steps", "0.1"), 0.1, 0),
        (("--warmup_ratio", "0.2"), 0.2, 0),
        (("--warmup_steps", "10", "--max_steps", "200"), 0.05, 0),
        (("--warmup_steps", "10"), 0.0, 1),
        (("--warmup_steps", "0.1", "--lr_scheduler_type", "constant"), 0.0, 1),
    ],
)
def test_flags_of_warm_up_translate(flags: tuple[str, ...], share: float, noted: int) -> None:
    result = translated("sft", *flags)
    assert result.run.actor.lr_warmup_ratio == share
    assert sum("--warmup" in note for note in result.notes) == noted


@pytest.mark.parametrize(
    ("kind", "given", "floor"),
    [
        ("cosine_with_min_lr", '{"min_lr_rate": 0.2}', 0.2),
        ("cosine_with_min_lr", "min_lr: 1e-6", 0.05),  # of 2e-5
        ("warmup_stable_decay", '{"min_lr_ratio": 0.3}', 0.3),
    ],
)
def test_the_floor_of_a_schedule_translates(kind: str, given: str, floor: float) -> None:
    result = translated("sft", "--lr_scheduler_type", kind, "--lr_scheduler_kwargs", given)
    assert result.run.actor.min_lr_ratio == pytest.approx(floor)
    assert not any("--lr_scheduler_kwargs" in note for note in result.notes)
    for other in ('{"min_lr_rate": "low"}', "0.1", "{"):
        with pytest.raises(ConfigurationError, match="--lr_scheduler_kwargs"):
            translated("sft", "--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", other)


def test_flags_of_adapters_translate() -> None:
    found = settings(
        "sft", "--use_peft", "--lora_r", "8", "--load_in_4bit", "--lora_target_modules", "q_proj", "v_proj"
    )
    assert holds(
        found,
        {
            "actor.lora.rank": 8,
            "actor.lora.alpha": 32,
            "actor.lora.target_modules": ("q_proj", "v_proj"),
            "actor.lora.load_in_4bit": True,
        },
    )
    assert settings("sft", "--lora_r", "8")["actor.lora.rank"] == 0
    assert settings("dpo", "--use_peft", "--use_rslora")["actor.lora.rslora"]
    assert not settings("dpo", "--use_peft")["actor.lora.rslora"]
    assert any("--use_rslora" in note for note in translated("sft", "--use_rslora").notes)
    made = settings("sft", "--use_peft", "--use_dora")
    assert (made["actor.lora.dora"], made["actor.lora.dropout"]) == (True, 0.0)
    assert any("--use_dora" in note for note in translated("sft", "--use_dora").notes)


@pytest.mark.parametrize(
    ("command", "flags", "instead"),
    [
        ("sft", ("--use_peft", "--lora_modules_to_save", "embed"), "leave --use_peft out"),
        ("sft", ("--use_peft", "--lora_target_parameters", "experts"), "--lora_target_modules"),
        ("sft", ("--optim", "adafactor"), "--actor.optim muon"),
        ("sft", ("--truncation_mode", "keep_end"), "--data.overlong drop"),
        ("kto", ("--ref_model_sync_steps", "64"), "never moves without --sync_ref_model"),
        ("sft", ("--lr_scheduler_kwargs", '{"num_cycles": 2}'), "--actor.lr_decay_ratio"),
        ("sft", ("--use_cpu",), "CUDA_VISIBLE_DEVICES"),
        ("dpo", ("--fsdp", "full_shard"), "--cluster.strategy fsdp2"),
        ("grpo", ("--vllm_max_model_length", "2048"), "vLLM does not sample without --use_vllm"),
    ],
)
def test_what_is_not_honoured_has_an_instead(command: str, flags: tuple[str, ...], instead: str) -> None:
    notes = translated(command, *flags).notes
    assert [note for note in notes if note.startswith("not honoured: --") and instead in note], notes


@pytest.mark.parametrize(
    ("command", "flags", "share"),
    [
        ("sft", (), 0.05),
        ("grpo", (), 0.05),
        ("sft", ("--lora_dropout", "0.2"), 0.2),
        ("sft", ("--lora_dropout", "0.2", "--disable_dropout"), 0.0),
        ("dpo", ("--lora_dropout", "0.2"), 0.0),
        ("dpo", ("--lora_dropout", "0.2", "--disable_dropout", "false"), 0.2),
        ("kto", ("--no_disable_dropout",), 0.05),
        ("reward", (), 0.0),
    ],
)
def test_adapters_leave_out_what_they_do_in_trl(command: str, flags: tuple[str, ...], share: float) -> None:
    result = translated(command, "--use_peft", *flags)
    assert result.run.actor.lora.dropout == share
    assert any("--lora_dropout" in note for note in result.notes) is (bool(flags) and "0.2" in flags and not share)


def test_flags_of_trackers_translate() -> None:
    flags = ("--report_to", "wandb", "tensorboard", "--project", "p", "--run_name", "n", "--output_dir", "runs/x")
    assert holds(
        settings("sft", *flags),
        {
            "logger.report_to": ("wandb",),
            "logger.project": "p",
            "logger.run_name": "n",
            "logger.tensorboard_dir": "runs/x/tensorboard",
        },
    )
    assert settings("sft", "--report_to", "none") == settings("sft")
    notes = translated("sft", "--report_to", "comet_ml", "--run_name", "n").notes
    assert [note.partition(":")[0] for note in notes if "report" in note] == ["not honoured", "not honoured"]


def test_switches_are_turned_off() -> None:
    assert settings("sft", "--no_gradient_checkpointing")["actor.gradient_checkpointing"] == "off"
    assert settings("sft", "--no_bf16")["actor.dtype"] == settings("sft", "--bf16", "False")["actor.dtype"] == "float32"
    assert not any("unused" in note for note in translated("sft", "--no_remove_unused_columns").notes)


def test_rows_of_a_packed_step_are_told() -> None:
    assert any("--per_device_train_batch_size" in note for note in translated("sft", "--packing").notes)


def test_flags_of_data_and_evaluation_translate() -> None:
    flags = ("--dataset_config", "main", "--dataset_train_split", "a", "--eval_strategy", "steps", "--eval_steps", "50")
    expected = {"data.dataset": "d.jsonl:main", "data.split": "a", "eval.dataset": "d.jsonl:main", "eval.steps": 50}
    assert holds(settings("kto", *flags), expected)
    assert settings("kto", *flags)["eval.split"] == "test"
    assert settings("kto")["eval.dataset"] is None
    assert settings("sft", "--assistant_only_loss")["data.train_on"] == "assistant"
    assert settings("sft", "--completion_only_loss", "False")["data.train_on"] == "all"
    streamed = settings("sft", "--dataset_streaming", "--max_steps", "9", "--neftune_noise_alpha", "5")
    assert holds(streamed, {"data.stream": True, "train.max_steps": 9, "train.neftune_alpha": 5.0})
    for command in ("dpo", "kto", "reward"):
        assert settings(command, "--streaming", "--max_steps", "9")["data.stream"]
    assert (settings("sft")["data.overlong"], settings("reward")["data.overlong"]) == ("cut", "drop")


@pytest.mark.parametrize("command", ["sft", "dpo", "kto", "reward"])
def test_the_chat_template_is_for_messages(command: str) -> None:
    assert not settings(command)["data.apply_chat_template"]
    if command in ("sft", "reward"):
        result = translated(command, "--chat_template_path", "{{ messages }}")
        assert result.run.data.apply_chat_template
        assert any("--chat_template_path" in note for note in result.notes)


def test_flags_of_preference_losses_translate() -> None:
    mixed = settings("dpo", "--loss_type", "sigmoid", "bco_pair", "sft", "--loss_weights", "0.8", "0.2", "1.0")
    assert holds(mixed, {"dpo.loss": ("sigmoid", "bco_pair", "sft"), "dpo.loss_weights": (0.8, 0.2, 1.0)})
    robust = settings("dpo", "--loss_type", "robust", "--label_smoothing", "0.1", "--beta", "0.3")
    assert holds(robust, {"dpo.loss": ("robust",), "dpo.label_smoothing": 0.1, "dpo.beta": 0.3})
    alpha = settings("dpo", "--f_divergence_type", "alpha_divergence", "--f_alpha_divergence_coef", "0.7")
    assert alpha["dpo.f_divergence"] == "alpha_divergence"
    assert alpha["dpo.f_alpha"] == pytest.approx(0.3)
    without = translated("kto", "--loss_type", "apo_zero_unpaired")
    assert without.run.kto.loss == "apo_zero_unpaired"
    told = [
        any("the distance from the reference" in note for note in found.notes) for found in (translated("kto"), without)
    ]
    assert told == [True, False]
    assert settings("reward", "--center_rewards_coefficient", "0.01")["rm.centring"] == 0.01
    smoothed = settings("dpo", "--loss_type", "aot_unpaired", "aot_pair", "--label_smoothing", "0.1")
    assert holds(smoothed, {"dpo.loss": ("aot_unpaired", "aot"), "dpo.label_smoothing": 0.1, "dpo.wpo": False})
    weighed = translated("dpo", "--use_weighting", "--loss_type", "sigmoid", "sft")
    assert weighed.run.dpo.wpo
    assert any("--use_weighting" in note for note in weighed.notes)
    assert not any("--use_weighting" in note for note in translated("dpo", "--use_weighting").notes)
    idle = ("--beta", "0.3", "--ld_alpha", "0.5", "--use_weighting", "--sync_ref_model", "--discopop_tau", "0.2")
    imitation = translated("dpo", "--loss_type", "sft", *idle)
    assert imitation.run.dpo == attrs.evolve(DPORun().dpo, loss=("sft",))
    assert {flag for flag in idle if flag.startswith("--")} == {
        note.split()[2].rstrip(":") for note in imitation.notes if note.startswith("not honoured: --")
    }
    assert settings("dpo", "--loss_type", "discopop", "--discopop_tau", "0.2")["dpo.discopop_tau"] == 0.2
    moving = settings("dpo", "--sync_ref_model", "--ref_model_mixup_alpha", "0.5")
    assert holds(moving, {"dpo.ref_sync_steps": 512, "dpo.ref_mixup": 0.5})
    unpaired = settings("kto", "--sync_ref_model", "--ref_model_sync_steps", "32")
    assert holds(unpaired, {"kto.ref_sync_steps": 32, "kto.ref_mixup": 0.6})
    still = translated("dpo", "--ref_model_sync_steps", "64")
    assert still.run.dpo.ref_sync_steps is None
    assert any("--ref_model_sync_steps" in note for note in still.notes)
    flags = ("--sync_ref_model", "--ref_model_sync_steps", "64")
    nearer = settings("grpo", "--beta", "0.04", *flags)
    assert holds(nearer, {"algo.kl.ref_sync_steps": 64, "algo.kl.ref_mixup": 0.6})
    assert any("--sync_ref_model" in note for note in translated("grpo", *flags).notes), "without --beta no KL"
    with pytest.raises(ConfigurationError, match="--loss_type"):
        translated("kto", "--loss_type", "other")


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "flag", ["num_generations", "gradient_accumulation_steps", "steps_per_generation", "num_iterations"]
)
def test_what_nothing_divides_by_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{flag} {value}: it must be at least 1"):
        translated("grpo", f"--{flag}", value)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-2"])
def test_epochs_are_a_number_above_0(value: str) -> None:
    with pytest.raises(ConfigurationError, match="--num_train_epochs"):
        translated("sft", "--num_train_epochs", value)


def test_an_older_name_of_the_loss_is_known() -> None:
    assert settings("sft", "--loss_type", "chunked_nll")["train.loss"] == "nll"


def test_what_a_script_does_beside_its_flags_is_said() -> None:
    notes = translate_command(["python", "examples/scripts/gspo.py", *LEAST, *BESIDE["grpo"]]).notes
    assert any(note.startswith("not honoured: examples/scripts/gspo.py: its flags alone are read") for note in notes)
    file = ["accelerate", "launch", "--config_file", "zero3.yaml", "trl/scripts/sft.py", *LEAST]
    assert any(
        "--accelerate_config zero3.yaml: write --num_processes" in note for note in translate_command(file).notes
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_earlier_releases_mean_the_same(command: str) -> None:
    older = ("--torch_dtype", "float16", "--evaluation_strategy", "epoch", "--group_by_length", "True")
    newer = ("--dtype", "float16", "--eval_strategy", "epoch", "--train_sampling_strategy", "True")
    assert settings(command, *older) == settings(command, *newer)


def test_flags_of_lengths_of_earlier_releases_translate() -> None:
    assert settings("grpo", "--max_prompt_length", "64")["data.max_prompt_tokens"] == 64
    assert any(
        "--max_prompt_length 64: longer" in note for note in translated("grpo", "--max_prompt_length", "64").notes
    )
    assert any("--max_length bounds" in note for note in translated("dpo", "--max_prompt_length", "64").notes)


def test_pairs_that_teach_nothing_are_told() -> None:
    for command in ("dpo", "reward"):
        assert any("pairs of equal replies" in note for note in translated(command).notes)
    assert not any("pairs of equal replies" in note for note in translated("sft").notes)
    assert any("empty replies, and pairs of which one is empty" in note for note in translated("kto").notes)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("sft",), True),
        (("dpo",), True),
        (("kto",), True),
        (("reward",), True),
        (("sft", "--assistant_only_loss"), False),
        (("sft", "--completion_only_loss", "False"), False),
        (("grpo",), False),
    ],
)
def test_what_follows_the_end_of_a_turn_is_told(words: tuple[str, ...], told: bool) -> None:
    found = any("after the token that ends a turn" in note for note in translated(*words).notes)
    assert found == told


@pytest.mark.parametrize(("losses", "told"), [(("sigmoid", "sft"), True), (("sigmoid",), False)])
def test_a_likelihood_that_trl_averages_in_micro_batches_is_told(losses: tuple[str, ...], told: bool) -> None:
    notes = translated("dpo", "--loss_type", *losses).notes
    assert any("the loss sft is the mean over the tokens" in note for note in notes) == told


def test_rows_without_a_margin_are_compared_as_in_trl() -> None:
    assert settings("reward")["rm.margin"] is False  # with it rows without margins would be refused
    assert any("a column margin" in note for note in translated("reward").notes)
