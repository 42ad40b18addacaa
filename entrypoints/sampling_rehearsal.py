"""`--dry_run` of commands that sample or judge replies and train nothing: `eval`, `generate`, `score`; and of the
sampling of loops.

Invariant: prompts and rewards are made like those of the command; no model is loaded, no engine started, and nothing is
written. Does not own: rules across settings (`application.settings`), and files (`dry_run`).
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from attrs import evolve

from rollgrad.adapters.data.datasets.survey import Surveyed
from rollgrad.application.settings.loop import LoopRun, sampling_run
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.application.settings.sections.algo import AlgoConfig
from rollgrad.application.settings.sections.critic import CriticConfig
from rollgrad.application.settings.sections.logger import LoggerConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.errors import ConfigurationError, RollgradError
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.lifetimes import shut_down
from rollgrad.entrypoints.composition.packages import check_packages
from rollgrad.entrypoints.dry_run import eval_file_problems, generation_file_problems, scoring_file_problems
from rollgrad.entrypoints.findings import Findings
from rollgrad.entrypoints.generation import surveyed
from rollgrad.entrypoints.named_paths import check_written
from rollgrad.entrypoints.rehearsal import Trial, usable_settings
from rollgrad.entrypoints.run_directory import check_output

UNTRAINED = "What it trains on is sampled first: its updates, their memory and its examples are not checked here."


def rehearse_evaluation(runs: Sequence[RLConfig], out: Path | None, errors: Sequence[RollgradError]) -> None:
    """Prints what `rollgrad eval` of the models of `runs` would do, with the file `out`, and a prompt and its reward.

    Raises:
        RollgradError: `errors`, and all other problems that would stop it.
    """
    files = {name: error for run in runs for name, error in eval_file_problems(run).items()}

    def play(trial: _SamplingTrial, config: RLConfig) -> None:
        trial.container.reward_spec.override(providers.Object(config.eval.dataset))
        trial.sample("eval_prompts", "eval.dataset", config.eval.n_samples_per_prompt, models=len(runs))
        trial.output(out)

    _rehearse(runs[0], runs[0], errors, files, play)


def rehearse_generation(config: RLConfig, out: Path | None, errors: Sequence[RollgradError]) -> None:
    """Prints what `rollgrad generate` would sample into the file `out`, and a prompt.

    Raises:
        RollgradError: `errors`, and all other problems that would stop it.
    """

    def play(trial: _SamplingTrial, config: RLConfig) -> None:
        trial.sample("prompts", "data.prompt_dataset", config.rollout.n_samples_per_prompt, judges=False)
        trial.output(out)

    files = {str(number): error for number, error in enumerate(generation_file_problems(config))}
    _rehearse(config, config, errors, files, play)


def rehearse_scoring(config: RLConfig, source: Path | None, out: Path | None, errors: Sequence[RollgradError]) -> None:
    """Prints what `rollgrad score` would judge of the file `source` into the file `out`.

    Raises:
        RollgradError: `errors`, and all other problems that would stop it.
    """

    def play(trial: _SamplingTrial, config: RLConfig) -> None:
        if source is not None:
            trial.replies(source, config)
        if source is not None and out is not None and source.absolute() == out.absolute():
            trial.refuse(f"--output is {str(out)!r}, which is the file that is read: choose another --output.")
        trial.output(out)
        trial.judge({})

    config = evolve(config, algo=AlgoConfig())
    files = {str(number): error for number, error in enumerate(scoring_file_problems(config))}
    _rehearse(config, config, errors, files, play)


def rehearse_loop(run: LoopRun, errors: Sequence[RollgradError]) -> None:
    """Prints what each iteration of a loop would sample, and a prompt and its reward.

    Raises:
        RollgradError: `errors`, and all other problems that would stop it before it trains.
    """
    config = sampling_run(run)
    files = {str(number): error for number, error in enumerate(generation_file_problems(config))}
    files |= eval_file_problems(config)

    def play(trial: _SamplingTrial, config: RLConfig) -> None:
        trial.attempt(partial(check_packages, run))
        if not (Path(run.ckpt.output_dir) / "loop.json").exists():
            trial.attempt(partial(check_output, run))
        trial.sample("prompts", "data.prompt_dataset", config.rollout.n_samples_per_prompt)
        if config.eval.dataset is not None:
            trial.sample("eval_prompts", "eval.dataset", config.eval.n_samples_per_prompt, judges=False)
        trial.say(UNTRAINED)

    _rehearse(run, config, errors, files, play)


class _SamplingTrial(Trial):
    """A command that samples or judges."""

    def sample(self, provider: str, setting: str, samples: int, *, models: int = 1, judges: bool = True) -> None:
        """Says which prompts of the dataset that `setting` names are sampled how often; shows and judges the first."""
        prompts = self._attempt(self.container.providers[provider], "actor.model_name_or_path", setting)
        if self._config.rollout.engine is Engine.VLLM:
            self._attempt(self.container.vllm_arguments, "actor.model_name_or_path")
        if not prompts:
            return
        number = len(prompts)
        of_models = f" of each of {models} models" if models > 1 else ""
        self.say(f"{setting}: {number:,} prompts; {number * samples:,} replies{of_models}, {samples} to each.")
        if isinstance(prompts, Surveyed):
            survey = prompts.survey
            self.say(f"The longest prompt has {survey.longest:,} tokens, and {survey.limit:,} are allowed.")
        first = prompts[0] if isinstance(prompts, list) else (self._attempt(lambda: prompts.take(1)) or [None])[0]
        if first is not None:
            self._attempt(self.container.tool_box)
            self.show(first)
        if judges:
            self.judge({"": [first] if first is not None else []})

    def replies(self, source: Path, config: RLConfig) -> None:
        """Says how many replies a file has."""
        if (found := self._attempt(partial(surveyed, source.absolute(), config))) is not None:
            keys, models = found
            self.say(f"{source}: {len(keys):,} replies to {len({row for row, _ in keys}):,} prompts.")
            if not config.actor.model_name_or_path and len(models) != 1:
                self.refuse(
                    f"{source} has tokens of {len(models)} models: name the one whose tokenizer reads them with "
                    "--actor.model_name_or_path."
                )

    def output(self, out: Path | None) -> None:
        """Checks the file that is written, and says that it goes on if it is there."""
        if out is None:
            return
        self._attempt(partial(check_written, "output", str(out.parent)))
        if out.exists():
            self.say(f"{out} is there: what it has already is left alone.")

    def say(self, text: str) -> None:
        """Prints a sentence."""
        self._say(text)

    def refuse(self, sentence: str) -> None:
        """Notes a problem."""
        self._errors.append(ConfigurationError(sentence))

    def attempt(self, check: Callable[[], object]) -> None:
        """Notes why a check fails."""
        self._attempt(check)


def _rehearse(
    run: RLConfig | LoopRun,
    config: RLConfig,
    errors: Sequence[RollgradError],
    files: Mapping[str, RollgradError],
    play: Callable[[_SamplingTrial, RLConfig], None],
) -> None:
    """Prints what `play` says between the verdict and the settings of `run`; `config` are those that it samples by."""
    findings = Findings(errors)
    usable = usable_settings(config)
    # The model as it is, and no training.
    plain = evolve(usable.actor, lora=LoraConfig(), optim_path=None, lr_scheduler_path=None)
    usable = evolve(usable, actor=plain, critic=CriticConfig(), logger=LoggerConfig())
    with contextlib.redirect_stdout(sys.stderr), findings.told(run):  # what libraries and reward functions print
        trial = _SamplingTrial(usable, findings, files)
        try:
            trial.attempt(partial(check_packages, usable))
            if usable.actor.model_name_or_path:
                trial.tokenizer()
            play(trial, usable)
        finally:
            shut_down(trial.container)
