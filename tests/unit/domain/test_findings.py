"""When a run is told that it cannot learn, and when not."""

from typing import Any

import pytest

from rollgrad.domain.control.findings import Finding, LearningWatch, finding_lines
from rollgrad.domain.control.rule import LearningSettings
from rollgrad.domain.control.signs import COLLAPSED_ENTROPY, WINDOW

HEALTHY = {
    "reward/mean": 0.4,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "rollout/samples": 64.0,
    "rollout/zero_spread_share": 0.5,
    "rollout/truncated_share": 0.8,
    "rollout/response_length_mean": 20.0,
    "rollout/entropy": 1.5,
    "rollout/reward_length_correlation": 0.3,
    "rollout/duplicate_share": 0.1,
    "rollout/all_passed_share": 0.1,
    "rollout/prompts_played": 8.0,
    "policy/mismatch_kl": 0.001,
    "policy/clip_low_share": 0.02,
    "policy/clip_high_share": 0.03,
    "advantage/abs_mean": 0.5,
    "policy/grad_norm": 0.7,
    "reward/part/right": 0.3,
    "reward/part/format": 0.1,
    "memory/host_share": 0.6,
    "time/step_s": 20.0,
    "time/sync_s": 0.4,
    "time/trainer_idle_share": 0.6,
    "time/generation_idle_share": 0.1,
}
NOTHING = {"rollout/zero_spread_share": 1.0, "advantage/abs_mean": 0.0, "policy/grad_norm": 0.0}
SIGNS: dict[str, dict[str, float]] = {
    "constant_reward": {"reward/mean": 0.0, "reward/max": 0.0, **NOTHING},
    "no_spread": NOTHING,
    "truncated": {"rollout/truncated_share": 1.0},
    "no_gradient": {"policy/grad_norm": 0.0},
    "reference_left": {"policy/ref_kl": 1.5},
    "kl_outweighs": {"policy/ref_kl": 0.125, "policy/kl_coef": 8.0},
    "entropy_collapsed": {"rollout/entropy": COLLAPSED_ENTROPY / 2},
    "no_step": {"train/grad_norm": 0.0},
    "reference_kept": {
        "train/chosen_reward": 0.0,
        "train/rejected_reward": 0.0,
        "train/chosen_fell_share": 0.0,
    },
    "chosen_fell": {"train/chosen_fell_share": 1.0, "train/chosen_logprob": -40.0},
    "reward_follows_length": {"rollout/reward_length_correlation": 0.9, "rollout/response_length_mean": 30.0},
    "mismatch_grows": {"policy/mismatch_kl": 0.05},
    "stale": {"rollout/rejected_stale": 3.0},
    "failing": {"rollout/failed_reward": 2.0, "rollout/failed_infrastructure": 1.0},
    "duplicates": {"rollout/duplicate_share": 0.9},
    "clipped": {"policy/clip_low_share": 0.2, "policy/clip_high_share": 0.2},
    "part_falls": {"reward/part/right": 0.1, "reward/mean": 0.6},
    "memory_full": {"memory/host_share": 0.99},
    "tools_fail": {"reward/tool_calls": 1.5, "reward/tool_errors": 1.5},
    "recomputing": {"rollout/recomputed_share": 0.7},
    "time_lost": {"time/sync_s": 9.0},
}
LONGER = {"rollout/reward_length_correlation": 0.8, "rollout/response_length_mean": 25.0}
GROWING = ("reward_follows_length", "mismatch_grows", "part_falls")
"""Signs that are seen beside the first rollouts."""
LOOK_AT = {
    "constant_reward": "--data.label_key",
    "no_spread": "--rollout.n_samples_per_prompt",
    "truncated": "where that is room enough, at --data.chat_template and --rollout.stop_strings",
    "no_gradient": "--algo.advantage.estimator",
    "reference_left": "--algo.kl.init_coef",
    "kl_outweighs": "--algo.kl.init_coef",
    "entropy_collapsed": "--rollout.temperature",
    "no_step": "rollgrad data show",
    "reference_kept": "--actor.adam.lr",
    "chosen_fell": "add sft to --dpo.loss",
    "reward_follows_length": "--reward.overlong_buffer_len",
    "mismatch_grows": "--algo.correction.level",
    "stale": "--train.max_staleness",
    "failing": "--reward.timeout",
    "tools_fail": "--agent.tools",
    "duplicates": "--rollout.temperature",
    "clipped": "--actor.eps_clip_low_high",
    "part_falls": "--reward.weights",
    "memory_full": "--rollout.max_concurrent",
    "recomputing": "--rollout.adaptive_concurrency",
    "time_lost": "--vllm.sync_backend",
}


def watch(*steps: dict[str, float], **settings: Any) -> tuple[LearningWatch, dict[int, list[Finding]]]:
    """A watch after these steps, and what it told at which."""
    state = LearningWatch(LearningSettings(**{"steps": 100, "max_new_tokens": 24, "held_by_kl": True, **settings}))
    told: dict[int, list[Finding]] = {}
    for step, metrics in enumerate(steps, start=1):
        state, found = state.observe(step, HEALTHY | metrics)
        if found:
            told[step] = list(found)
    return state, told


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_is_told_once_with_numbers_and_the_setting_to_look_at(name: str) -> None:
    state, told = watch(*[{}] * WINDOW, *[SIGNS[name]] * 10)
    assert list(told) == [2 * WINDOW]
    (finding,) = told[2 * WINDOW]
    assert (finding.name, finding.since) == (name, WINDOW + 1)
    assert LOOK_AT[name] in finding.look_at
    assert any(character.isdigit() for character in finding.evidence)
    assert state.findings()[0].until == WINDOW + 10


def test_replies_that_ended_at_first_are_not_said_to_need_more_room() -> None:
    grown = SIGNS["truncated"] | {"rollout/response_length_mean": 40.0}
    _, told = watch(*[{"rollout/response_length_mean": 3.0}] * WINDOW, *[grown] * WINDOW)
    (finding,) = told[2 * WINDOW]
    assert "40 tokens, 3 at first): the model has learned to go on" in finding.evidence
    assert finding.look_at.startswith("the reward, which may grow with the length, and at --actor.adam.lr, before")


LIMITS: list[tuple[str, dict[str, float], dict[str, float]]] = [
    ("truncated", {"rollout/truncated_share": 0.99}, {"rollout/truncated_share": 0.989}),
    ("no_gradient", {"policy/grad_norm": 1e-8}, {"policy/grad_norm": 1.01e-8}),
    ("reference_left", {"policy/ref_kl": 1.0}, {"policy/ref_kl": 0.99}),
    ("kl_outweighs", {"policy/ref_kl": 0.125, "policy/kl_coef": 6.0}, {"policy/kl_coef": 5.99}),
    ("kl_outweighs", {"policy/ref_kl": 0.125, "policy/kl_coef": 6.0}, {"rollout/zero_spread_share": 0.6}),
    ("kl_outweighs", {"policy/ref_kl": 0.125, "policy/kl_coef": 6.0, "reward/mean": 0.5}, {"reward/mean": 0.501}),
    ("entropy_collapsed", {"rollout/entropy": 0.00999}, {"rollout/entropy": 0.01}),
    ("reward_follows_length", LONGER, {"rollout/reward_length_correlation": 0.799}),
    ("reward_follows_length", LONGER, {"rollout/response_length_mean": 24.99}),
    ("mismatch_grows", {"policy/mismatch_kl": 0.01}, {"policy/mismatch_kl": 0.00999}),
    ("stale", {"rollout/rejected_stale": 2.0}, {"rollout/rejected_stale": 1.99}),
    ("failing", {"rollout/samples": 98.0, "rollout/failed_reward": 2.0}, {"rollout/samples": 98.1}),
    ("duplicates", {"rollout/duplicate_share": 0.8}, {"rollout/duplicate_share": 0.799}),
    ("duplicates", {"rollout/duplicate_share": 0.8}, {"rollout/all_passed_share": 0.5}),
    ("clipped", {"policy/clip_low_share": 0.05, "policy/clip_high_share": 0.25}, {"policy/clip_low_share": 0.049}),
    ("part_falls", {"reward/part/right": 0.15, "reward/mean": 0.6}, {"reward/part/right": 0.151}),
    ("part_falls", {"reward/part/right": 0.15, "reward/mean": 0.401}, {"reward/mean": 0.4}),
    ("tools_fail", {"reward/tool_calls": 2.0, "reward/tool_errors": 1.8}, {"reward/tool_errors": 1.79}),
    ("tools_fail", {"reward/tool_calls": 0.1, "reward/tool_errors": 0.1}, {"reward/tool_calls": 0.0}),
    ("memory_full", {"memory/host_share": 0.97}, {"memory/host_share": 0.969}),
    ("recomputing", {"rollout/recomputed_share": 0.5}, {"rollout/recomputed_share": 0.499}),
    ("time_lost", {"time/sync_s": 6.0}, {"time/sync_s": 5.99}),
    ("time_lost", {"time/trainer_idle_share": 0.8}, {"time/trainer_idle_share": 0.799}),
    ("time_lost", {"time/generation_idle_share": 0.5}, {"time/generation_idle_share": 0.499}),
    ("time_lost", {"time/step_s": 1.0, "time/sync_s": 0.3}, {"time/step_s": 0.99}),
]
"""For each sign metrics at its limit, and what has to change in them so that it is none."""


@pytest.mark.parametrize(("name", "metrics", "harmless"), LIMITS)
def test_a_sign_begins_at_its_limit(name: str, metrics: dict[str, float], harmless: dict[str, float]) -> None:
    _, told = watch(*[{}] * WINDOW, *[metrics] * WINDOW)
    assert [finding.name for found in told.values() for finding in found] == [name]
    assert watch(*[{}] * WINDOW, *[metrics | harmless] * WINDOW)[1] == {}


@pytest.mark.parametrize("name", SIGNS)
def test_a_sign_of_fewer_rollouts_is_chance(name: str) -> None:
    state, told = watch(*([SIGNS[name]] * (WINDOW - 1) + [{}]) * 5)
    assert told == {}
    assert state.summary() == ()


@pytest.mark.parametrize("name", SIGNS)
def test_a_finding_is_told_again_only_after_it_had_ended(name: str) -> None:
    begun = [{}] * WINDOW
    flickering, told = watch(*begun, *[SIGNS[name]] * WINDOW, *[{}] * (WINDOW - 1), *[SIGNS[name]] * WINDOW)
    assert list(told) == [2 * WINDOW]
    assert len(flickering.findings()) == 1
    ended, told = watch(*begun, *[SIGNS[name]] * WINDOW, *[{}] * WINDOW, *[SIGNS[name]] * WINDOW)
    assert list(told) == [2 * WINDOW, 4 * WINDOW]
    assert [(finding.since, finding.until) for finding in ended.findings()] == [(4, 6), (10, 12)]


def test_a_finding_ends_by_rollouts_in_a_row_alone() -> None:
    gaps = ([{}] * (WINDOW - 1) + [SIGNS["failing"]]) * 3
    state, told = watch(*[{}] * WINDOW, *[SIGNS["failing"]] * WINDOW, *gaps)
    assert list(told) == [2 * WINDOW]
    assert [(found.since, found.until) for found in state.findings()] == [(WINDOW + 1, 2 * WINDOW + len(gaps))]


def test_steps_without_an_update_are_none_in_which_the_gradient_was_not_0() -> None:
    state = LearningWatch(LearningSettings(steps=100, max_new_tokens=24))
    for step, metrics in enumerate(({"policy/grad_norm": 0.0}, {}, {"policy/grad_norm": 0.0}), start=1):
        state, _ = state.observe(step, metrics)
    assert state.summary()[0] == "Nothing was learned: the gradient was 0 in all 2 updates."


def test_what_comes_and_goes_is_one_sentence() -> None:
    state, _ = watch(*[{}] * WINDOW, *([SIGNS["failing"]] * WINDOW + [{}] * WINDOW) * 5)
    assert len(state.findings()) == 5
    (line,) = state.summary()
    assert line.startswith("steps 4 to 6, 10 to 12, 16 to 18 and 2 times more: Episodes failed")


def test_a_healthy_run_hears_nothing() -> None:
    state, told = watch(*[{}] * 50)
    assert told == {}
    assert state.summary() == ()


def test_a_cause_is_not_told_a_second_time_by_its_effect() -> None:
    _, told = watch(*[SIGNS["constant_reward"]] * 5)
    assert [finding.name for found in told.values() for finding in found] == ["constant_reward"]
    _, told = watch(*[SIGNS["no_spread"]] * 5)
    assert [finding.name for found in told.values() for finding in found] == ["no_spread"]


def test_a_constant_is_one_number_over_the_rollouts_too() -> None:
    changing = [{"reward/min": value, "reward/max": value, "policy/grad_norm": 0.3} for value in (0.0, 0.5, 0.0, 0.5)]
    assert watch(*changing)[1] == {}


def test_rollouts_of_one_reply_that_is_compared_with_itself_are_told() -> None:
    """Its reward is the least and the greatest, and another one in each rollout."""
    rollouts = [NOTHING | {"rollout/samples": 1.0, "reward/min": value, "reward/max": value} for value in (0, 1, 0, 1)]
    _, told = watch(*rollouts, compared_in_groups=False)
    (finding,) = told[WINDOW]
    assert finding.name == "no_gradient"
    assert "--rollout.batch_size and --rollout.n_samples_per_prompt" in finding.look_at


def test_a_constant_reward_of_replies_that_were_cut_off_names_what_cuts_them() -> None:
    _, told = watch(*[SIGNS["constant_reward"] | SIGNS["truncated"]] * WINDOW)
    constant = next(finding for finding in told[WINDOW] if finding.name == "constant_reward")
    assert "100% of the latest were cut off" in constant.evidence
    assert "--rollout.max_episode_tokens" in str(constant)


def test_one_step_is_told_as_one() -> None:
    found = Finding(name="truncated", since=1, until=1, evidence="Cut off.", look_at="--rollout.max_new_tokens")
    assert finding_lines([found])[0].startswith("step 1: Cut off.")


def test_solved_prompts_are_told_apart_from_a_reward_that_says_nothing() -> None:
    _, told = watch(*[SIGNS["constant_reward"] | {"reward/min": 1.0, "reward/max": 1.0}] * WINDOW)
    assert "solved" in told[WINDOW][0].evidence
    _, told = watch(*[SIGNS["constant_reward"]] * WINDOW)
    assert "64 replies" in told[WINDOW][0].evidence
    assert "solved" not in told[WINDOW][0].evidence


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("no_spread", {"compared_in_groups": False}),  # a critic, or the batch's mean, compares beyond the group
        ("no_spread", {"judged_by_outcome": False}),
        ("constant_reward", {"judged_by_outcome": False}),  # a teacher, or single turns
        ("reference_left", {"judged_by_outcome": False}),
        ("kl_outweighs", {"judged_by_outcome": False}),
        ("kl_outweighs", {"held_by_kl": False}),  # from a reference that knows more, it is what is learned
    ],
)
def test_what_is_harmless_to_an_estimator_is_not_told(name: str, settings: dict[str, bool]) -> None:
    harmless = SIGNS[name] | {"advantage/abs_mean": 0.3, "policy/grad_norm": 0.1}
    assert watch(*[harmless] * 10, **settings)[1] == {}


def test_kl_in_the_reward_adds_up_over_a_reply_beside_rewards_as_large_as_they_are() -> None:
    weighed = {"policy/ref_kl": 0.125, "policy/kl_coef": 1.4}  # 0.7 a token, 3.1 in 20 tokens
    assert watch(*[{}] * WINDOW, *[weighed] * 10)[1] == {}
    _, told = watch(*[{}] * WINDOW, *[weighed] * 10, kl_in_reward=True)
    (finding,) = told[2 * WINDOW]
    assert (finding.name, "about 3.1 against 1 " in finding.evidence) == ("kl_outweighs", True)
    large = weighed | {"reward/max": 10.0}
    assert watch(*[{}] * WINDOW, *[large] * 10, kl_in_reward=True)[1] == {}


def test_kl_in_the_reward_gives_groups_without_spread_a_gradient() -> None:
    assert watch(*[SIGNS["no_spread"] | {"advantage/abs_mean": 0.01, "policy/grad_norm": 0.1}] * 10)[1] == {}


@pytest.mark.parametrize("name", ["constant_reward", "no_spread", "no_gradient", "no_step"])
def test_a_short_run_is_told_before_it_is_over(name: str) -> None:
    state, told = watch(SIGNS[name] | {"policy/grad_norm": 0.0}, steps=1)
    assert name in [finding.name for finding in told[1]]
    assert state.summary()[0] == "Nothing was learned: the gradient was 0 in the only update."


@pytest.mark.parametrize("name", ["truncated", "entropy_collapsed"])
def test_two_rollouts_are_too_few_for_a_sign_with_which_weights_still_change(name: str) -> None:
    assert watch(*[SIGNS[name]] * 2, steps=2)[1] == {}


def test_a_sign_that_comes_and_goes_is_told_ever_more_rarely_and_listed_each_time() -> None:
    sign = SIGNS["truncated"]
    state, told = watch(*([sign] * WINDOW + [{}] * WINDOW) * 20)
    period = 2 * WINDOW
    assert list(told) == [WINDOW + period * (time - 1) for time in (1, 2, 4, 8, 16)]
    assert len(state.findings()) == 20


def test_a_watch_goes_on_from_what_was_logged() -> None:
    steps = [{}] * WINDOW + [SIGNS["mismatch_grows"], SIGNS["truncated"]] * 4 + [SIGNS["truncated"]] * WINDOW
    whole, _ = watch(*steps)
    logged: dict[str, dict[int, float]] = {"eval/pass@1": {2: 0.5}}
    for step, metrics in enumerate(steps, start=1):
        for metric, value in (HEALTHY | metrics).items():
            logged.setdefault(metric, {})[step] = value
    again = LearningWatch(whole.run).after(logged)
    assert again == whole
    for step in range(len(steps) + 1):
        begun = {name: {at: value for at, value in values.items() if at <= step} for name, values in logged.items()}
        assert LearningWatch(whole.run).after(begun).after(logged, step) == whole
    assert [finding.name for finding in again.holding] == ["truncated"]


def test_the_summary_says_whether_anything_was_learned() -> None:
    state, _ = watch(*[SIGNS["constant_reward"]] * 4, steps=4)
    assert state.summary()[0] == "Nothing was learned: the gradient was 0 in all 4 updates."
    assert state.summary()[1].startswith("steps 1 to 4: The reward was 0 for every reply")
    state, _ = watch(*[SIGNS["constant_reward"] | {"policy/grad_norm": 0.2}] * 4, steps=4, compared_in_groups=False)
    assert state.summary()[0].startswith("Nothing was learned from the reward")
    constant = SIGNS["constant_reward"] | {"policy/grad_norm": 0.2}
    state, _ = watch(*[constant] * 3, {}, constant, steps=5, compared_in_groups=False)
    assert [line[:15] for line in state.summary()] == ["steps 1 to 5: T"]  # a rollout had several rewards
    state, _ = watch({}, *[SIGNS["constant_reward"]] * 3, steps=4)
    assert [line[:15] for line in state.summary()] == ["steps 2 to 4: T"]


def test_while_only_the_critic_learns_no_gradient_is_missed() -> None:
    metrics = {key: value for key, value in HEALTHY.items() if key != "policy/grad_norm"}
    state = LearningWatch(LearningSettings(steps=10))
    for step in range(1, 6):
        state, found = state.observe(step, metrics)
        assert found == ()
    assert state.summary() == ()


def test_trainer_and_engine_are_compared_over_tokens_as_old() -> None:
    """A run that begins with fresh tokens, and again with one where it continues."""
    fresh, old = {"policy/mismatch_kl": 0.001}, {"policy/mismatch_kl": 0.02, "staleness/mean": 1.0, "policy/lr": 1e-5}
    begun = [fresh, fresh, *[old] * 10, fresh, *[old] * 10]
    assert watch(*begun)[1] == {}
    _, told = watch(*begun, *[old | {"policy/mismatch_kl": 0.1}] * WINDOW)
    (finding,) = told[len(begun) + WINDOW]
    assert finding.name == "mismatch_grows"
    assert "0.1 nats per token in 3 rollouts in a row, and 0.02 in the first with tokens as old" in finding.evidence
    _, told = watch(*begun, *[fresh | {"policy/mismatch_kl": 0.2}] * WINDOW)
    assert [finding.name for found in told.values() for finding in found] == ["mismatch_grows"]


@pytest.mark.parametrize("name", GROWING)
def test_a_sign_that_was_there_from_the_beginning_does_not_grow(name: str) -> None:
    assert watch(*[SIGNS[name]] * 20)[1] == {}


def test_equal_replies_to_solved_prompts_are_no_fault() -> None:
    assert watch(*[SIGNS["duplicates"] | {"rollout/all_passed_share": 0.9}] * 10)[1] == {}


@pytest.mark.parametrize("name", ["truncated", "duplicates"])
def test_answers_of_one_token_are_neither_cut_off_nor_repeated(name: str) -> None:
    assert watch(*[SIGNS[name]] * 10, max_new_tokens=1)[1] == {}
    assert watch(*[SIGNS[name]] * 10, max_new_tokens=2)[1] != {}


def test_equal_replies_are_explained_by_the_entropy() -> None:
    _, told = watch(*[SIGNS["duplicates"] | SIGNS["entropy_collapsed"]] * 10)
    assert [finding.name for found in told.values() for finding in found] == ["entropy_collapsed"]


def test_failures_are_told_by_kind_but_not_those_to_which_no_reward_applies() -> None:
    _, told = watch(*[SIGNS["failing"] | {"rollout/failed_not_applicable": 40.0}] * WINDOW)
    assert "of the last 67: 1 by infrastructure, 2 by reward" in told[WINDOW][0].evidence
    assert watch(*[{"rollout/failed_not_applicable": 40.0}] * 10)[1] == {}


@pytest.mark.parametrize(
    ("metrics", "evidence", "look_at"),
    [
        ({"memory/gpu_retries": 4.0}, "4 times in the last", "--train.max_tokens_per_micro_batch"),
        ({"time/trainer_idle_share": 0.9}, "90% of a step's 20 s went into waiting of the trainer", "max_concurrent"),
        ({"time/generation_idle_share": 0.6}, "waiting of the engines for the trainer", "--train.max_staleness"),
    ],
)
def test_what_is_full_or_waits_is_named(metrics: dict[str, float], evidence: str, look_at: str) -> None:
    (finding,) = watch(*[metrics] * WINDOW)[1][WINDOW]
    assert evidence in finding.evidence
    assert look_at in finding.look_at


def test_the_shares_of_steps_that_take_no_time_are_chance() -> None:
    assert watch(*[{"time/step_s": 0.3, "time/sync_s": 0.2, "time/trainer_idle_share": 0.95}] * 10)[1] == {}


@pytest.mark.parametrize(
    "harmless",
    [
        {"reward/part/right": 0.2, "reward/mean": 0.6},  # not yet half
        {"reward/part/right": 0.1, "reward/mean": 0.3},  # the whole reward falls, which everybody sees
        {"reward/part/late": -0.3, "reward/mean": 0.6},
    ],
)
def test_a_part_that_falls_with_the_reward_or_a_little_is_not_told(harmless: dict[str, float]) -> None:
    begun = {"reward/part/late": -0.1}  # a penalty, which contributes less than nothing
    assert watch(*[begun] * WINDOW, *[begun | harmless] * 10)[1] == {}


@pytest.mark.parametrize(
    "steps",
    [
        {name: value for name, value in HEALTHY.items() if name != "rollout/entropy"},
        {"train/grad_norm": 0.5, "train/chosen_reward": 0.0, "train/rejected_reward": 0.0},  # of a reward model
    ],
    ids=["no entropy", "no reference"],
)
def test_what_a_run_does_not_log_is_no_sign(steps: dict[str, float]) -> None:
    state = LearningWatch(LearningSettings(steps=100, max_new_tokens=24))
    for step in range(1, 2 * WINDOW):
        state, _ = state.observe(step, steps)
    assert state.findings() == ()


@pytest.mark.parametrize(
    ("length", "settings"), [(115.0, {}), (200.0, {"judged_by_outcome": False})], ids=["a seventh", "of a teacher"]
)
def test_replies_that_grow_less_or_by_no_reward_are_no_sign(length: float, settings: dict[str, Any]) -> None:
    begun = {"rollout/response_length_mean": 100.0}
    grown = {"rollout/response_length_mean": length, "rollout/reward_length_correlation": 0.9}
    assert watch(*[begun] * WINDOW, *[grown] * WINDOW, **settings)[1] == {}


def test_equal_rewards_of_a_prompt_are_no_sign_where_replies_are_not_compared() -> None:
    """That the gradient is 0 has another reason then."""
    state, _ = watch(*[{**HEALTHY, **NOTHING}] * (WINDOW + 1), compared_in_groups=False)
    assert [finding.name for finding in state.findings()] == ["no_gradient"]


def evaluation(mean: float, error: float = 0.05) -> dict[str, float]:
    return {"eval/mean@1": mean, "eval/mean_stderr": error}


def after_evaluations(*results: dict[str, float], rewards: float = 0.4, **settings: Any) -> dict[int, list[Finding]]:
    """Returns what a run is told at each step after which it is evaluated, from step 0 on; its rewards go from 0.4 to
    `rewards`."""
    state = LearningWatch(LearningSettings(**{"steps": 100, **settings}))
    told: dict[int, list[Finding]] = {}
    for step, result in enumerate(results):
        if step:
            reward = 0.4 + (rewards - 0.4) * step / (len(results) - 1)
            state, found = state.observe(step, HEALTHY | {"reward/mean": reward})
            assert found == ()
        state, found = state.evaluated(step, result)
        if found:
            told[step] = list(found)
    return told


def test_evaluations_that_fall_are_told_with_what_training_did_meanwhile() -> None:
    good, bad = evaluation(0.6), evaluation(0.2)
    course = [evaluation(0.3), good, good, *[bad] * 5]
    told = after_evaluations(*course, rewards=0.9)
    assert list(told) == [4]
    (finding,) = told[4]
    assert (finding.name, finding.since) == ("evaluation_falls", 3)
    assert "from 0.6 after step 1 to 0.2 (standard error 0.05) in 2 evaluations in a row" in finding.evidence
    assert "while the reward of training rose from" in finding.evidence
    assert "--ckpt.best_metric" in finding.look_at
    (finding,) = after_evaluations(*course, rewards=0.1)[4]
    assert "while" not in finding.evidence
    assert "--actor.adam.lr" in finding.look_at


@pytest.mark.parametrize(
    "course",
    [
        [evaluation(0.6), evaluation(0.39), evaluation(0.39)],  # 2.97 standard errors
        [evaluation(0.6), evaluation(0.2), evaluation(0.6), evaluation(0.2), evaluation(0.6)],  # one at a time
        [evaluation(0.6, 0.0), evaluation(0.2, 0.0), evaluation(0.2, 0.0)],  # prompts without any difference
        [{"eval/mean@1": 0.6}, {"eval/mean@1": 0.2}, {"eval/mean@1": 0.2}],  # one prompt
        [{"eval/loss": 0.6}, {"eval/loss": 0.2}, {"eval/loss": 0.2}],
        [evaluation(0.2), evaluation(0.4), evaluation(0.6), evaluation(0.8)],
        [evaluation(0.6), {}, evaluation(float("nan")), evaluation(float("nan"))],
    ],
)
def test_evaluations_that_differ_by_chance_are_not_told(course: list[dict[str, float]]) -> None:
    assert after_evaluations(*course) == {}


def test_an_evaluation_falls_from_its_limit_on() -> None:
    limit = 0.6 - 3 * (2 * 0.05**2) ** 0.5 - 1e-9
    assert list(after_evaluations(evaluation(0.6), evaluation(limit), evaluation(limit))) == [2]


def test_evaluations_with_other_settings_are_not_compared() -> None:
    course = [evaluation(0.6), evaluation(0.6), evaluation(0.2), evaluation(0.2), evaluation(0.2)]
    assert list(after_evaluations(*course)) == [3]
    assert after_evaluations(*course, evaluations_since=2) == {}


def test_a_watch_goes_on_with_evaluations_that_were_logged() -> None:
    logged: dict[str, dict[int, float]] = {}
    state = LearningWatch(LearningSettings(steps=100))
    for step, mean in enumerate((0.6, 0.6, 0.2, 0.2)):
        rows = [HEALTHY, evaluation(mean)] if step else [evaluation(mean)]
        state = (state.observe(step, HEALTHY)[0] if step else state).evaluated(step, evaluation(mean))[0]
        for row in rows:
            for name, value in row.items():
                logged.setdefault(name, {})[step] = value
    assert [found.name for found in state.findings()] == ["evaluation_falls"]
    assert LearningWatch(state.run).after(logged) == state
    # A page that looks on may see a step before its evaluation.
    steps_only = {name: values for name, values in logged.items() if not name.startswith("eval/")}
    assert LearningWatch(state.run).after(steps_only).after(logged, 3).findings() == state.findings()
