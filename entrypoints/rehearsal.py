"""`--dry_run`: does everything that a run does before its first step, except loading models, and reports all problems
at once.

Invariant: prompts, rewards and tools are made like those of the run. Does not own: rules across settings
(`application.settings.validation`), files and memory (`dry_run`).
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from attrs import evolve

from rollgrad.adapters.data.datasets.survey import Survey, Surveyed
from rollgrad.adapters.rewards.weighted import WeightedRewards
from rollgrad.application.episodes.judging import answer_request
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.application.settings.derived import longest_sample, longest_sequence
from rollgrad.application.settings.rules.inputs import prompt_mixture_problems
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.still_weights import still_sentences
from rollgrad.application.settings.validation import range_problems, with_defaults
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.errors import CheckpointError, ConfigurationError, RollgradError
from rollgrad.domain.ports.chat_codec import RenderedPrompt
from rollgrad.domain.ports.environment import tool_schema
from rollgrad.entrypoints.composition.adapters import check_writer, without_weights
from rollgrad.entrypoints.composition.lifetimes import shut_down
from rollgrad.entrypoints.composition.packages import check_packages
from rollgrad.entrypoints.composition.rl.container import rl_container
from rollgrad.entrypoints.composition.rl.data import longest_told, note_repeated_prompts
from rollgrad.entrypoints.composition.rl.rewards import check_reward_model, named_rewards, reward_kinds
from rollgrad.entrypoints.description import check_continues
from rollgrad.entrypoints.dry_run import counts, file_problems, show_plan
from rollgrad.entrypoints.findings import Findings
from rollgrad.entrypoints.planned_machine import knows_machines
from rollgrad.entrypoints.run_directory import begun, continues

Made = TypeVar("Made")

UNASKED = {
    "model": "The reward model is not loaded here: of it, only the shape and the memory were checked.",
    "remote": "The reward server is not asked here: whether it answers shows at the first reply.",
    "judge": "The judge is not asked here: whether it answers shows at the first reply.",
    "teacher": "There is no reward to ask: the teacher's log-probs are all.",
    "none": "There is no reward to ask: it comes from the episodes, which are not played here.",
}
"""Notes about rewards that need a model, a server or an episode, and are not called."""
MADE_UP = "Hello."
"""Made-up reply to prompts without a label."""


def rehearse(config: RLConfig, errors: Sequence[RollgradError]) -> None:
    """Prints the verdict, memory plan, counts, a prompt and its reward, and the settings that differ from defaults.

    Args:
        config: the run.
        errors: problems that are known already.

    Raises:
        RollgradError: `errors`, and all other problems that would stop the run.
    """
    findings = Findings(errors)
    with contextlib.redirect_stdout(sys.stderr), findings.told(config):  # what libraries and reward functions print
        usable = usable_settings(config)
        trial = _TrainingTrial(usable, findings, file_problems(usable))
        try:
            trial.play()
        finally:
            shut_down(trial.container)


def usable_settings(config: RLConfig) -> RLConfig:
    """Returns the settings with which a rehearsal goes on: those out of range have their defaults, and datasets whose
    probabilities are wrong follow one another."""
    mixture = ["data.prompt_probs"] if any(prompt_mixture_problems(config)) else []
    return with_defaults(config, [*range_problems(config), *mixture])


class Trial:
    """Runs one check after the other, if its inputs could be made; collects all problems.

    Args:
        config: the run.
        findings: collects problems, and what is said.
        files: settings that name what is not there, and why.
    """

    def __init__(self, config: RLConfig, findings: Findings, files: Mapping[str, RollgradError]) -> None:
        findings.errors += files.values()
        self._findings, self._errors, self._say = findings, findings.errors, findings.say
        self._config = config
        empty = {
            "actor.model_name_or_path": config.actor.model_name_or_path,
            "data.prompt_dataset": config.data.prompt_dataset,
        }
        self._broken = {*files, *(key for key, value in empty.items() if not value)}
        self.container = rl_container(config)

    def tokenizer(self) -> None:
        """Loads the tokenizer, without which no prompts are made, of a model that writes texts."""
        self._attempt(lambda: check_writer(self._config))
        if self._attempt(self.container.tokenizer, "actor.model_name_or_path") is None:
            self._broken |= {"data.prompt_dataset", "eval.dataset"}
            if isinstance(self._errors[-1], CheckpointError):
                self._broken.add("actor.model_name_or_path")

    def show(self, prompt: Prompt) -> None:
        """Says a prompt, as the model sees it, and what the reference reads in its place."""
        config, tokens, text = self._config, len(prompt.token_ids), prompt.text
        talks = config.agent.tools is not None or config.agent.system_prompt is not None
        if talks and (opening := self._attempt(partial(asyncio.run, self._opening(prompt)))):
            tokens, text = len(opening.token_ids), opening.text
        own = config.train.agent_func_path or config.agent.command
        seen = "as the model sees it" if own is None else f"which {own} may begin otherwise, with tools for example"
        self._say(f"A prompt, {seen} ({tokens} tokens; label {prompt.label!r}):")
        self._say(text)
        if told := prompt.teacher_token_ids:
            self._say(f"What the reference reads in its place ({len(told)} tokens):")
            self._say(self.container.codec().decode(told, special_tokens=True))

    async def _opening(self, prompt: Prompt) -> RenderedPrompt:
        """Returns a conversation as it begins with the run's tools, of servers too, and its system prompt."""
        box = self.container.tool_box()
        try:
            world = ToolEnvironment(await box.open(), system_prompt=self._config.agent.system_prompt)
            return self.container.codec().render(await world.reset(prompt), [tool_schema(tool) for tool in world.tools])
        finally:
            await box.aclose()

    def judge(self, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        """Calls the reward with a made-up reply to each prompt; the keys say in words which prompts they are."""
        config = self._config
        if config.train.agent_func_path is not None:
            file = self._attempt(self.container.agent_file)
            if file is None:
                return
        if config.agent.command is not None:
            self._attempt(self.container.agent_command)
        spec, sources = self.container.reward_spec(), self.container.reward_sources()
        kinds = reward_kinds(config, spec)
        if "model" in kinds:
            self._attempt(lambda: check_reward_model(config), "reward.model_name_or_path")
        unasked = [kind for kind in kinds if kind in UNASKED]
        for kind in unasked:
            if kind != "model":
                self._attempt(sources[kind])
            self._say(UNASKED[kind])
        rewards = self._attempt(lambda: named_rewards(config, spec, sources, UNASKED), "reward.function_path") or {}
        if len(rewards) > 1 and not unasked:
            rewards["all together"] = WeightedRewards({**rewards}, config.reward.weights)
        for name, reward in rewards.items():
            whose = f" ({name})" if len(config.reward.sources) > 1 else ""
            for which, its in prompts.items():
                for prompt in its:
                    self._attempt(partial(self._judge_one, reward, prompt, which, whose))

    def _judge_one(self, reward: Any, prompt: Prompt, which: str, whose: str) -> None:
        labelled = isinstance(prompt.label, str | int | float)
        reply = str(prompt.label) if labelled else MADE_UP
        request = answer_request(self.container.codec(), prompt, reply, step=0)
        (judged,) = asyncio.run(reward.score([request]))
        made = "the label alone" if labelled else "made up"
        self._say(f"The reward{whose} of the reply {reply!r} ({which}{made}) is {judged.value:g}.")

    def _usable(self, *keys: str) -> bool:
        """Returns whether nothing is known to be wrong with these settings."""
        return not self._broken.intersection(keys)

    def _attempt(self, make: Callable[[], Made], *needs: str) -> Made | None:
        """Returns the result of `make`, None if it fails; it is not called without the files of the settings
        `needs`."""
        return self._findings.attempt(make) if self._usable(*needs) else None


class _TrainingTrial(Trial):
    """A training run."""

    def play(self) -> None:
        """Runs all checks."""
        config, container = self._config, self.container
        self._attempt(lambda: check_packages(config))
        self.tokenizer()
        self._attempt(container.suits, *(f"{section}.model_name_or_path" for section in ("actor", "ref", "critic")))
        prompts = self._attempt(container.prompts, "actor.model_name_or_path", "data.prompt_dataset")
        held_out = self._attempt(container.eval_prompts, "actor.model_name_or_path", "eval.dataset")
        note_repeated_prompts(config, container.environment(), prompts, held_out)
        self._plan(prompts.survey if isinstance(prompts, Surveyed) else None, held_out or ())
        for sentence in (*without_weights(config), *(self._attempt(lambda: still_sentences(config)) or ())):
            self._say(sentence)
        if prompts is not None:
            self._say(counts(config, len(prompts)))
        self._attempt(container.tool_box)
        self._attempt(container.on_step)
        self._attempt(container.group_filter)
        self._attempt(container.trackers)
        self._attempt(container.own_optimizers)
        self._attempt(container.tells_teacher)
        if continues(config.ckpt):
            read = ("actor.model_name_or_path", "data.prompt_dataset")
            self._attempt(lambda: check_continues(begun(config.ckpt), container.description()), *read)
        shown: list[Prompt] = []
        if prompts is not None:
            shown += self._attempt(lambda: prompts.take(1)) or []
            kept = len(prompts)
            if isinstance(prompts, Surveyed):
                survey = prompts.survey
                dropped = len(survey.lengths) - kept
                self._say(
                    f"Prompts: {kept:,} of {len(survey.lengths):,} rows (over-long and dropped: {dropped:,}); "
                    f"the longest has {survey.longest:,} tokens, and {survey.limit:,} are allowed."
                )
        if held_out:
            longest = max(len(prompt.token_ids) for prompt in held_out)
            self._say(f"Held-out prompts: {len(held_out):,}; the longest has {longest:,} tokens.")
        for prompt in shown:
            self.show(prompt)
        self.judge({"": shown, "to a held-out prompt, ": (held_out or [])[:1]})

    def _plan(self, survey: Survey | None, held_out: Sequence[Prompt]) -> None:
        """Prints the memory plan: by the longest prompt that there is, where an episode is a prompt and a reply, and by
        what the reference is told in its place."""
        config = self._config
        plays = self.container.plays()
        if survey is not None and not plays:
            longest = max([survey.longest, *(len(prompt.token_ids) for prompt in held_out)])
            config = evolve(config, data=evolve(config.data, max_prompt_tokens=longest))
        keys = ("actor", "critic", "ref", "reward")
        told = 0 if survey is None else max(0, longest_told(config, survey) - survey.longest)
        shortages = self._attempt(
            lambda: show_plan(config, self._findings.console, told=told), *(f"{key}.model_name_or_path" for key in keys)
        )
        for sentence in shortages or ():
            if knows_machines(config.cluster):
                self._errors.append(ConfigurationError(sentence))
            else:  # the cluster's machines are not this one
                self._say(sentence)
        if plays and longest_sequence(config, plays=True) is None:
            self._say(
                f"No setting bounds an episode of several turns: the plan takes {longest_sample(config):,} tokens for "
                "the longest, and a longer one takes more memory. Bound them by --rollout.max_episode_tokens."
            )
