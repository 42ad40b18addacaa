"""Flags of OpenRLHF for advantages, losses, corrections and optimizers are translated."""

import pytest

from rollgrad.application.settings.correction import correction_level
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.openrlhf.command import translate, translated_config
from tests.openrlhf_commands import GROUP, LEAST, MODULE, at, config_of, notes_of


def test_without_flags_openrlhf_s_defaults_count() -> None:
    expected = {
        "algo.advantage.estimator": "gae",
        "algo.advantage.gamma": 1.0,
        "algo.advantage.lambd": 1.0,
        "algo.kl.init_coef": 0.01,
        "algo.kl.estimator": "k1",
        "algo.kl.use_loss": False,
        "actor.adam.lr": 1e-6,
        "actor.lr_scheduler": "cosine_with_min_lr",
        "actor.lr_warmup_ratio": 0.03,
        "actor.min_lr_ratio": 0.1,
        "actor.eps_clip": None,
        "actor.loss_aggregation": None,
        "critic.adam.lr": 9e-6,
        "critic.lr_scheduler": "cosine_with_min_lr",
        "critic.lr_warmup_ratio": 0.03,
        "critic.value_clip": 0.5,
        "critic.freezing_steps": 0,
        "rollout.batch_size": 1024,
        "rollout.n_samples_per_prompt": 1,
        "rollout.max_new_tokens": 1024,
        "train.batch_size": 128,
        "data.max_prompt_tokens": 1024,
        "data.apply_chat_template": False,
        "reward.clip_range": (-10.0, 10.0),
        "reward.function_path": "reward.py",
        "ckpt.output_dir": "./ckpt",
    }
    config = config_of()
    assert {name: at(config, name) for name in expected} == expected
    assert notes_of() == []


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_estimators_with_flags_that_do_not_fit_all_of_them(estimator: str) -> None:
    flags = (
        *("--advantage_estimator", estimator, *GROUP, "--gamma", "0.9", "--lambd", "0.95"),
        *("--no_advantage_std_norm", "--critic_learning_rate", "1e-5", "--value_clip", "0.2", "--l2", "0.1"),
        *("--critic_pretrain", "c", "--freezing_actor_steps", "2", "--critic.min_lr_ratio", "0.2"),
    )
    config, notes = config_of(*flags), "\n".join(notes_of(*flags))
    assert config.algo.advantage.estimator == estimator
    assert config.actor.loss_aggregation is None  # token_mean, that of the ppo loss
    critic = estimator == "gae"
    assert config.critic.adam.lr == (1e-5 if critic else 9e-6)
    assert config.critic.model_name_or_path == ("c" if critic else None)
    for flag in ("--critic_learning_rate", "--value_clip", "--critic_pretrain", "--critic.min_lr_ratio"):
        assert (f"{flag} " in notes) is not critic
    assert "--l2" not in notes
    assert ("--gamma 0.9" in notes) is (estimator not in ("gae", "reinforce"))
    assert ("--lambd 0.95" in notes) is not critic
    assert ("--no_advantage_std_norm" in notes) is (estimator in ("rloo", "group_norm", "dr_grpo"))


def test_freezing_counts_from_zero() -> None:
    config = config_of("--freezing_actor_steps", "2")
    assert config.critic.freezing_steps == 3
    assert notes_of("--freezing_actor_steps", "2") == [
        "not identical: --freezing_actor_steps 2: 3 rollouts, since OpenRLHF counts from 0"
    ]


def test_the_critic_starts_from_the_reward_model() -> None:
    argv = [*MODULE, "--pretrain", "m", "--prompt_data", "d", "--reward_pretrain", "r"]
    assert translated_config(argv)[0].critic.model_name_or_path == "r"
    assert translated_config([*argv, "--critic_pretrain", "c"])[0].critic.model_name_or_path == "c"
    assert translated_config([*argv, "--remote_rm_url", "f.py"])[0].critic.model_name_or_path is None
    assert translated_config([*argv, "--advantage_estimator", "reinforce"])[0].critic.model_name_or_path is None


CORRECTION = ("--enable_vllm_is_correction",)


@pytest.mark.parametrize(
    ("flags", "level", "mode", "low", "high"),
    [
        ((), "auto", "truncate", 0.5, 2.0),
        (CORRECTION, "token", "clip", 0.5, 5.0),
        ((*CORRECTION, "--vllm_is_truncated_threshold", "0.1", "3"), "token", "clip", 0.1, 3.0),
        ((*CORRECTION, "--vllm_is_truncated_threshold", "3"), "token", "truncate", 0.5, 3.0),
        ((*CORRECTION, "--use_icepop"), "token", "mask", 0.5, 5.0),
        ((*CORRECTION, "--vllm_is_correction_type", "seq-mask-tis"), "geometric", "mask", 0.5, 5.0),
        (
            (
                "--algo.advantage.is_correction_enable",
                *("--algo.advantage.is_correction_type", "icepop"),
                *("--algo.advantage.is_correction_threshold", "0.8", "1.2"),
            ),
            *("token", "mask", 0.8, 1.2),
        ),
    ],
)
def test_flags_of_corrections_set_level_mode_and_bounds(
    flags: tuple[str, ...], level: str, mode: str, low: float, high: float
) -> None:
    correction = config_of(*flags).algo.correction
    assert (correction.level, correction.mode, correction.low, correction.high) == (level, mode, low, high)
    assert notes_of(*flags) == []


def test_icepop_without_a_correction_does_nothing() -> None:
    assert correction_level(config_of("--use_icepop")) == "off"
    assert notes_of("--use_icepop") == [
        "not honoured: --use_icepop: no correction is made without --enable_vllm_is_correction, or a "
        "--algo.advantage.is_correction_level"
    ]


IS = "--algo.advantage.is_correction"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("off", ("auto", "truncate", "ratio", 0.5, 2.0)),
        ("token", ("token", "mask", "ratio", 0.5, 5.0)),
        ("seq", ("geometric", "mask", "ratio", 0.5, 5.0)),
        (f"token {IS}_mode clip", ("token", "clip", "ratio", 0.5, 5.0)),
        (f"token {IS}_mode clip {IS}_threshold 3", ("token", "truncate", "ratio", 0.5, 3.0)),
    ],
)
def test_corrections_of_todays_release(flags: str, expected: tuple[str, str, str, float, float]) -> None:
    correction = config_of(f"{IS}_level", *flags.split()).algo.correction
    found = (correction.level, correction.mode, correction.gate, correction.low, correction.high)
    assert found == expected
    assert notes_of(f"{IS}_level", *flags.split()) == []


@pytest.mark.parametrize(("level", "ours"), [("token", "token"), ("seq", "geometric")])
def test_gates_of_a_correction(level: str, ours: str) -> None:
    flags = (f"{IS}_level", level, f"{IS}_gating", "binary_kl", f"{IS}_threshold", "0.01")
    correction = config_of(*flags).algo.correction
    assert (correction.level, correction.mode, correction.gate) == (ours, "mask", "binary_kl")
    assert correction.threshold == 0.01
    for more in ((f"{IS}_mode", "clip"), (f"{IS}_threshold", "0.5", "2")):
        with pytest.raises(ConfigurationError, match="gating binary_kl leaves out what is above one bound"):
            translate([*MODULE, *LEAST, *flags, *more])


def test_kl_as_a_loss_with_its_true_gradient() -> None:
    """w k1 grad log pi, which is the gradient of rho k3."""
    flags = ("--algo.kl.use_loss", "--algo.kl.estimator", "k2", "--algo.kl.unbiased_gradient")
    assert config_of(*flags).algo.kl.estimator == "k3_unbiased"
    assert notes_of(*flags) == []
    assert len(notes_of(*flags[1:])) == 1, "without a loss"


@pytest.mark.parametrize("term", ["--entropy_loss_coef 0.01", "--use_kl_loss --kl_estimator k3"])
def test_means_of_terms_beside_a_loss_over_sequences_are_told(term: str) -> None:
    told = "not identical: KL and entropy in the loss are means over replies, as the loss is, in OpenRLHF over tokens"
    for loss, tells in (("gspo", True), ("ppo --actor.loss_agg_mode seq-mean-token-mean", True), ("ppo", False)):
        loss_flags = f"--policy_loss_type {loss}".split()
        assert (told in notes_of(*loss_flags, *term.split())) is tells
        assert told not in notes_of(*loss_flags)


def test_flags_of_loss_aggregation_translate() -> None:
    mean = ("--actor.loss_agg_mode", "seq-mean-token-mean")
    assert config_of(*mean).actor.loss_aggregation == "sequence_mean"
    assert config_of("--actor.loss_agg_mode", "token-mean").actor.loss_aggregation == "token_mean"
    assert len(notes_of(*mean, "--policy_loss_type", "gspo")) == 1


def test_gspo_takes_its_clip_range_and_no_other_correction() -> None:
    config = config_of("--policy_loss_type", "gspo")
    assert (config.actor.policy_loss_type, config.actor.eps_clip) == ("gspo", 0.2)  # OpenRLHF's one default
    assert config.actor.loss_aggregation is None  # sequence_mean, its own
    config = config_of("--policy_loss_type", "gspo", "--eps_clip_low_high", "3e-4", "4e-4", *CORRECTION)
    assert config.actor.eps_clip_low_high == (3e-4, 4e-4)
    assert config.actor.eps_clip is None
    # It takes its ratio against the rollout, and makes no other correction.
    assert (config.algo.old_logprobs, correction_level(config)) == ("rollout", "off")
    assert config_of("--policy_loss_type", "gspo", "--dual_clip", "3").actor.dual_clip is None
    assert len(notes_of("--policy_loss_type", "gspo", "--dual_clip", "3")) == 1


def test_flags_of_clip_ranges_translate() -> None:
    assert config_of("--eps_clip", "0.1", "--dual_clip", "3").actor.eps_clip == 0.1
    assert config_of("--dual_clip", "3").actor.dual_clip == 3
    both = ("--eps_clip", "0.1", "--eps_clip_low_high", "0.2", "0.3")
    assert config_of(*both).actor.eps_clip_low_high == (0.2, 0.3)
    assert notes_of(*both) == ["not honoured: --eps_clip 0.1: --eps_clip_low_high replaces it"]


def test_flags_of_the_kl_term_translate() -> None:
    kl = config_of("--init_kl_coef", "0.001", "--use_kl_loss", "--kl_estimator", "k3").algo.kl
    assert (kl.init_coef, kl.use_loss, kl.estimator) == (0.001, True, "k3")
    kl = config_of("--kl_target", "0.1", "--kl_horizon", "5000").algo.kl
    assert (kl.target, kl.horizon) == (0.1, 5000)
    short = ("--kl_target", "0.1", "--kl_horizon", "100", "--rollout_batch_size", "64", "--n_samples_per_prompt")
    assert not any("shorter" in note for note in notes_of(*short, "1"))
    assert any("by a fifth at most" in note for note in notes_of(*short, "8"))
    assert config_of("--use_kl_loss").algo.kl.estimator == "k2"
    assert "becomes k2" in notes_of("--use_kl_loss")[0]
    off = ("--init_kl_coef", "0", "--use_kl_loss", "--kl_estimator", "k3", "--kl_target", "1", "--kl_horizon", "9")
    assert config_of(*off).algo.kl == RLConfig().algo.kl
    assert len(notes_of(*off)) == 4
    assert len(notes_of("--kl_horizon", "9")) == 1


def test_over_sampling_needs_a_correction() -> None:
    more = ("--vllm_generate_batch_size", "2048")
    assert config_of(*more).rollout.generate_batch_size is None
    assert len(notes_of(*more)) == 1
    assert config_of(*more, *CORRECTION).rollout.generate_batch_size == 2048
    assert notes_of("--vllm_generate_batch_size", "1024") == []


@pytest.mark.parametrize(
    ("scheduler", "ours", "warmup", "floor"),
    [
        ("constant", "constant", 0.0, 0.1),
        ("constant_with_warmup", "constant", 0.03, 0.1),
        ("linear", "linear", 0.03, 0.0),
        ("cosine", "cosine_with_min_lr", 0.03, 0.0),
        ("cosine_with_min_lr", "cosine_with_min_lr", 0.03, 0.1),
        ("warmup_stable_decay", "warmup_stable_decay", 0.03, 0.0),
        ("polynomial", "cosine_with_min_lr", 0.03, 0.1),
    ],
)
def test_learning_rate_schedules_translate(scheduler: str, ours: str, warmup: float, floor: float) -> None:
    config = config_of("--lr_scheduler", scheduler)
    for model in (config.actor, config.critic):
        assert (model.lr_scheduler, model.lr_warmup_ratio, model.min_lr_ratio) == (ours, warmup, floor)
    assert len(notes_of("--lr_scheduler", scheduler)) == (scheduler == "polynomial")


def test_flags_of_the_optimizer_translate() -> None:
    flags = ("--adam_betas", "0.8", "0.9", "--l2", "0.1", "--max_norm", "0.5", "--actor_learning_rate", "2e-6")
    config = config_of(*flags, "--critic_learning_rate", "3e-6", "--actor.optim", "adam")
    for model, lr in ((config.actor, 2e-6), (config.critic, 3e-6)):
        assert (model.adam.betas, model.adam.weight_decay, model.max_norm) == ((0.8, 0.9), 0.1, 0.5)
        assert model.adam.lr == lr
    assert notes_of("--actor.optim", "adam") == []


def test_experts_are_balanced() -> None:
    assert config_of("--aux_loss_coef", "0.1").actor.aux_loss_coef == 0.1
    assert notes_of("--aux_loss_coef", "0.1") == []


def test_flags_of_moving_averages_translate() -> None:
    train = config_of("--enable_ema", "--ema_beta", "0.9").train
    assert (train.enable_ema, train.ema_beta) == (True, 0.9)
    (note,) = notes_of("--enable_ema")
    assert note.startswith("not identical: --enable_ema: the averages are saved in ema")


def test_flags_of_muon_translate() -> None:
    config = config_of("--actor.optim", "muon", "--actor.max_norm", "0", "--critic.optim", "muon")
    assert (config.actor.optim, config.critic.optim) == ("muon", "muon")
    assert (config.actor.muon.lr, config.actor.muon.momentum) == (0.02, 0.95)
    given = ("--actor.optim", "muon", "--actor.muon.lr", "0.01", "--actor.muon.momentum", "0.9")
    assert (config_of(*given).actor.muon.lr, config_of(*given).actor.muon.momentum) == (0.01, 0.9)
    assert notes_of(*given, "--actor.max_norm", "0", "--actor.muon.ns_steps", "5") == []
    (clipped,) = notes_of(*given)
    assert clipped.startswith("not identical: --actor.optim muon: gradients are clipped before")
    (ignored,) = notes_of("--actor.muon.lr", "0.01")
    assert ignored.startswith("not honoured: --actor.muon.lr 0.01: ")
    assert config_of("--actor.muon.lr", "0.01") == config_of()
