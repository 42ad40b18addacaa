"""The run of a verl command: batches, lengths, data, rewards, agents, evaluation, and its files."""

import re

from rollgrad.application.settings.sections.logger import TRACKERS
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.names.names_of_verl_seldom_set import ACTOR, REF, ROLLOUT
from rollgrad.entrypoints.verl.draft import RLDraft, VerlDraft
from rollgrad.entrypoints.verl.overlap import translate_overlap
from rollgrad.entrypoints.verl.words import FULLY_ASYNC, RECIPE, plain

REWARD_TIMEOUT = 180.0
"""Seconds that a reward model may take, for which verl waits without end."""

PASS_TOKENS = 16384
"""Tokens of a pass at most where verl counts samples: our default."""

RESULTS = ("max_tool_response_length", "tool_response_truncate_side")
VERLS_RESULT, SHORTEST_RESULT = 256, 100
"""Characters of a tool's result that verl shows by default, and the fewest that are shown here."""

RESUMES = {"auto": "auto", "disable": "never", "resume_path": "always"}
"""verl's ways of continuing a run, and ours."""

OVERLONG = "reward_model.overlong_buffer"
MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name")
WITHOUT_PENALTIES = ("naive", "prime", "batch")
"""Reward managers of verl's that know no penalty of length."""
TEMPLATE = "data.apply_chat_template_kwargs."
TURNS = f"{ROLLOUT}.multi_turn"


def translate_run(draft: RLDraft) -> None:
    """Sets `rollout`, `train`, `data`, `reward`, `agent`, `eval`, `ckpt` and `logger`.

    Raises:
        ConfigurationError: a value is not of its kind.
    """
    _batches(draft)
    translate_overlap(draft)
    if not draft.counts_prompts:
        translate_length(draft, epochs="train.num_episodes")
    _passes(draft)
    _data(draft)
    _agent(draft)
    _reward(draft)
    _evaluation(draft)
    translate_files(draft)
    translate_tracking(draft)


def _batches(draft: RLDraft) -> None:
    prompts, samples = draft.prompts, draft.positive(f"{ROLLOUT}.n")
    draft.set("rollout.batch_size", prompts)
    mini = draft.positive(f"{ACTOR}.ppo_mini_batch_size")
    if mini > prompts:
        draft.change(f"{ACTOR}.ppo_mini_batch_size", f"{prompts}, for a rollout has no more prompts")
    draft.set("train.batch_size", min(mini, prompts) * samples)
    draft.set("rollout.top_k", max(0, draft.value(f"{ROLLOUT}.top_k", 0) or 0))
    if draft.module != FULLY_ASYNC and draft.value("data.gen_batch_size", prompts) != prompts:
        filters = draft.value("algorithm.filter_groups.enable", False)
        draft.lose(
            "data.gen_batch_size",
            "a group that is filtered is replaced by a new prompt at once, in verl by a batch of them"
            if filters
            else "a rollout samples the prompts that it trains on",
        )


def translate_length(draft: VerlDraft, *, epochs: str) -> None:
    """Sets how long the run is: its steps, or passes over the data, which are the setting `epochs`.

    Raises:
        ConfigurationError: a value is not of its kind.
    """
    steps = draft.value("trainer.total_training_steps")
    if steps is not None:
        draft.set("train.max_steps", steps)
        draft.lose("trainer.total_epochs", "trainer.total_training_steps says how long the run is, in verl too")
    elif (passes := draft.value("trainer.total_epochs")) is not None:
        draft.set(epochs, passes)


def _passes(draft: RLDraft) -> None:
    """Translates how much goes through a model at once: tokens with dynamic batches, else samples, each of which is
    counted as long as the longest: as many may have that length."""
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu"
    each, whole = f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"
    longest = draft.positive("data.max_prompt_length") + draft.positive("data.max_response_length")
    scoring = (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu")
    if draft.value(f"{ACTOR}.use_dynamic_bsz", False):
        draft.set("train.max_tokens_per_micro_batch", draft.value(tokens))
        if (given := next((name for name in scoring if name in draft.options), None)) is not None:
            draft.set("train.max_tokens_per_scoring_pass", draft.value(given))
        for name in (each, whole):
            if draft.asks(name):
                draft.lose(name, "with use_dynamic_bsz passes are filled with tokens, in verl too")
        return
    for name in (tokens, *scoring):
        draft.lose(name, "verl reads it with use_dynamic_bsz only")
    micro = draft.value(each)
    if micro is None and (of_all := draft.value(whole)) is not None:
        micro = max(1, of_all // draft.gpus)
    if micro is not None and micro >= 1:
        filled = min(micro * longest, PASS_TOKENS)
        draft.set("train.max_tokens_per_micro_batch", filled)
        for name in (each, whole):
            draft.change(name, f"passes are filled up to {filled} tokens, however many samples these are")


def files(draft: VerlDraft, name: str) -> str | None:
    """Returns the files of data in one text, with commas between them; None without any."""
    return ",".join(draft.value(name) or ()) or None


def _data(draft: RLDraft) -> None:
    dataset = files(draft, "data.train_files")
    if dataset is not None:
        draft.set("data.prompt_dataset", dataset)
    for name, ours in (("train", "data"), ("val", "eval")):
        most = draft.value(f"data.{name}_max_samples", -1)
        if most is not None and most > 0 and (ours == "data" or "data.val_files" in draft.options):
            draft.set(f"{ours}.max_samples", most)
    if not draft.value("data.filter_overlong_prompts", False):
        if draft.value("data.truncation") == "error":
            draft.set("data.overlong", "error")
        else:
            draft.change("data.truncation", "longer prompts are dropped and counted, in verl cut")
    translate_template(draft)


def translate_template(draft: VerlDraft) -> None:
    """Sets the variables of the chat template."""
    variables = {
        name.removeprefix(TEMPLATE): plain(" ".join(given.values))
        for name, given in draft.options.items()
        if name.startswith(TEMPLATE) and not given.unset
    }
    if variables:
        draft.set("data.chat_template_kwargs", variables)


def _agent(draft: RLDraft) -> None:
    """Translates episodes of several turns, whose tools or environment are files here."""
    if not draft.plays:
        for key in ("max_assistant_turns", "max_user_turns", *RESULTS):
            if draft.asks(f"{TURNS}.{key}"):
                draft.lose(f"{TURNS}.{key}", "episodes have one turn, in verl too")
        return
    turns = [count for key in ("assistant", "user") if (count := draft.value(f"{TURNS}.max_{key}_turns"))]
    if turns:
        draft.set("rollout.max_turns", min(turns))
    else:
        draft.change(f"{TURNS}.enable", "an episode has 8 turns at most, in verl any number: see rollout.max_turns")
    longest = draft.positive("data.max_prompt_length") + draft.positive("data.max_response_length")
    draft.set("rollout.max_episode_tokens", longest)
    for key, setting, what in (
        ("interaction_config_path", "train.agent_func_path", "a class Environment"),
        ("function_tool_path", "agent.tools", "functions with @rollgrad.tool"),
        ("tool_config_path", "agent.tools", "functions with @rollgrad.tool"),
    ):
        name = f"{TURNS}.{key}"
        if draft.asks(name):
            file = re.sub(r"\.\w+$", "", draft.value(name)) + ".py"
            draft.set(setting, file)
            draft.change(name, f"{file}, a file that has {what} in the place of verl's classes: write it")
            _results(draft, has_tools=setting == "agent.tools")
            return
    draft.changed.append(
        "episodes have several turns without tools of the command's: name a file with functions with @rollgrad.tool in "
        "agent.tools"
    )
    draft.set("agent.tools", "tools.py")
    _results(draft, has_tools=True)


def _results(draft: RLDraft, *, has_tools: bool) -> None:
    """Translates how much of a tool's result the model is shown."""
    length, side = (f"{TURNS}.{key}" for key in RESULTS)
    if has_tools:
        shown = draft.value(length)
        draft.set("agent.max_result_chars", max(SHORTEST_RESULT, VERLS_RESULT if shown is None else shown))
        if draft.value(side, "middle") != "middle":
            draft.change(side, "a long result loses its middle")
        return
    for name in (length, side):
        if draft.asks(name):
            draft.lose(name, "the environment shows what it likes of its tools' results")


def _reward(draft: RLDraft) -> None:
    function = draft.value("custom_reward_function.path")
    if function is not None:
        draft.set("reward.function_path", f"{function}:{draft.value('custom_reward_function.name')}")
    elif draft.has_reward_model:
        draft.set("reward.model_name_or_path", draft.value("reward_model.model.path"))
        draft.set("reward.timeout", REWARD_TIMEOUT)
    elif not draft.distils or draft.rewarded or files(draft, "data.val_files"):
        draft.set("reward.verifier", "math")
        draft.changed.append(
            "without custom_reward_function.path the verifier math judges, in verl what it has for the row's "
            "data_source: set reward.function_path to a function of your own, or of verl's reward_score"
        )
    if function is None:
        draft.lose(
            "custom_reward_function.name", "there is no function without custom_reward_function.path, in verl neither"
        )
    if function is not None and draft.has_reward_model:
        draft.lose(
            "reward_model.enable", "custom_reward_function.path judges alone: a sum of both needs --reward.weights"
        )
    elif not draft.has_reward_model and draft.asks("reward_model.model.path"):
        draft.lose("reward_model.model.path", "no reward model is loaded without reward_model.enable")
    if not draft.value(f"{OVERLONG}.enable", False):
        for key in ("len", "penalty_factor"):
            draft.lose(
                f"{OVERLONG}.{key}", "there is no length penalty without overlong_buffer.enable, in verl neither"
            )
        return
    if draft.value(f"{OVERLONG}.len") is None:
        raise ConfigurationError(
            f"{draft.options[f'{OVERLONG}.enable']} needs a number of tokens: add {OVERLONG}.len=4096, say."
        )
    managers = [draft.value(name)[-1] for name in MANAGERS if name in draft.options]
    manager = managers[-1] if managers else "dapo" if draft.module == RECIPE else "naive"
    if manager in WITHOUT_PENALTIES:
        draft.change(
            f"{OVERLONG}.enable", f"counts, in verl with the reward manager dapo alone, which here is {manager}"
        )
    draft.set("reward.overlong_buffer_len", draft.value(f"{OVERLONG}.len"))
    draft.set("reward.overlong_penalty_factor", draft.value(f"{OVERLONG}.penalty_factor"))


def _evaluation(draft: RLDraft) -> None:
    sampling = [f"{ROLLOUT}.val_kwargs.{key}" for key in ("temperature", "n", "do_sample", "top_p", "top_k")]
    dataset = files(draft, "data.val_files")
    if dataset is None:
        for name in (*sampling, "trainer.test_freq", "trainer.val_before_train", "data.val_max_samples"):
            if draft.asks(name) and draft.options[name].values != ("-1",):
                draft.lose(name, "there is nothing to evaluate on without data.val_files")
        return
    draft.set("eval.dataset", dataset)
    draft.set("eval.steps", period(draft, "trainer.test_freq"))
    if not draft.value("trainer.val_before_train"):
        draft.change("trainer.val_before_train", "evaluates before and after training")
    temperature, samples = draft.value(sampling[0]), draft.value(sampling[1]) or 1
    if not draft.value(sampling[2]) or temperature == 0:
        if samples > 1:
            draft.change(sampling[1], "one sample of each prompt, for greedy samples are all alike")
        if temperature:
            draft.change(sampling[0], "evaluation is greedy without val_kwargs.do_sample")
        for name, whole in ((sampling[3], 1.0), (sampling[4], -1)):
            if draft.value(name) != whole:
                draft.lose(name, "evaluation is greedy")
        temperature, samples = 0.0, 1
    draft.set("eval.temperature", temperature)
    draft.set("eval.n_samples_per_prompt", samples)
    if temperature:
        draft.set("eval.top_p", draft.value(sampling[3]))
        draft.set("eval.top_k", max(0, draft.value(sampling[4])))


def period(draft: VerlDraft, name: str) -> int:
    """Returns a number of steps from one thing to the next; -1 for none."""
    text = str(draft.value(name) or -1)
    if re.fullmatch(r"-?\d+", text):
        return int(text) if int(text) > 0 else -1
    draft.lose(name, "a number of steps is needed")
    return -1


def translate_files(draft: VerlDraft) -> None:
    """Sets `ckpt`. verl saves training states, from which it continues by default.

    Raises:
        ConfigurationError: a value is not of its kind.
    """
    names = [str(draft.value(f"trainer.{key}_name")) for key in ("project", "experiment")]
    place = draft.value("trainer.default_local_dir") or "/".join(["checkpoints", *names])
    draft.set("ckpt.output_dir", place)
    frequency = period(draft, "trainer.save_freq")
    for key in ("save_steps", "state_steps"):
        draft.set(f"ckpt.{key}", frequency)
    draft.set("ckpt.resume", RESUMES[draft.one_of("trainer.resume_mode", tuple(RESUMES))])
    if draft.asks("trainer.resume_from_path"):
        draft.lose("trainer.resume_from_path", f"a run continues in its own directory, {place}")
    for name in ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"):
        if draft.asks(name):
            draft.set("ckpt.keep_models", draft.value(name))
            draft.set("ckpt.keep_states", draft.value(name))


def translate_tracking(draft: VerlDraft) -> None:
    """Sets `logger`.

    Raises:
        ConfigurationError: a value is not of its kind.
    """
    asked = draft.value("trainer.logger")
    if "trainer.logger" not in draft.options:
        draft.changed.append("metrics are reported to no tracker, in verl to wandb: set logger.report_to wandb")
    asked = asked or []
    project, run = (draft.value(f"trainer.{key}_name") for key in ("project", "experiment"))
    if "tensorboard" in asked:
        draft.set("logger.tensorboard_dir", f"tensorboard_log/{project}/{run}")
    if others := sorted({*asked} - {*TRACKERS, "tensorboard", "console", "file"}):
        draft.lose(
            "trainer.logger", f"metrics are reported to {', '.join(TRACKERS)} or tensorboard, not to {others[0]}"
        )
    if ours := [name for name in asked if name in TRACKERS]:
        draft.set("logger.report_to", ours)
        draft.set("logger.project", project)
        draft.set("logger.run_name", run)
