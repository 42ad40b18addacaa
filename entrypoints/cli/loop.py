"""`rollgrad loop rs`, `loop iter_dpo` and `loop csft`."""

import sys
from collections.abc import Mapping, Sequence

from attrs import define, frozen

from rollgrad.application.settings.loop import CSFTRun, IterDPORun, LoopRun, RSRun, sampling_run
from rollgrad.application.settings.loop_rules import loop_errors
from rollgrad.domain.errors import raise_together
from rollgrad.entrypoints.cli.output import results_only_on_stdout
from rollgrad.entrypoints.cli.parsing import RunFlags, dry_run_setting, parse_run
from rollgrad.entrypoints.config_io import dump_config
from rollgrad.entrypoints.redaction import print_settings


@define(kw_only=True, slots=False)
class LoopFlags(RunFlags):
    """Flags of loops."""

    dry_run: bool = dry_run_setting("loop", "prompts, the reward")


@define(kw_only=True)
class RSArguments(LoopFlags, RSRun):
    """Rejection sampling: samples replies, keeps the best ones, and fine-tunes the model on them, again and again. The
    same command continues a loop that was cut off. Every setting below is also a key of the YAML file."""


@define(kw_only=True)
class IterDPOArguments(LoopFlags, IterDPORun):
    """Iterated DPO: samples replies, and trains the model on the best against the worst reply to each prompt, again and
    again. The same command continues a loop that was cut off. Every setting below is also a key of the YAML file."""


@define(kw_only=True)
class CSFTArguments(LoopFlags, CSFTRun):
    """Conditional fine-tuning: samples replies, and fine-tunes the model on all of them, each prompt saying what its
    reply is worth, again and again; then the best is asked for. The same command continues a loop that was cut off.
    Every setting below is also a key of the YAML file."""


@frozen
class Loop:
    """A loop: `rollgrad loop NAME`."""

    purpose: str
    arguments: type[LoopFlags]
    run: type[LoopRun]


LOOPS: Mapping[str, Loop] = {
    "rs": Loop("sample, and fine-tune on the best replies, again and again", RSArguments, RSRun),
    "iter_dpo": Loop("sample, and train on the best against the worst", IterDPOArguments, IterDPORun),
    "csft": Loop("sample, and fine-tune on condition of the reward", CSFTArguments, CSFTRun),
}
"""By name."""


def run_loop(name: str, arguments: Sequence[str]) -> int | None:
    """Runs or continues a loop, or with --print_config prints its settings; returns the signal that interrupted it.

    Raises:
        RollgradError: a flag, a setting, a file or a reply is wrong.
    """
    parsed, run, unread = parse_run(LOOPS[name].arguments, LOOPS[name].run, f"loop {name}", arguments)
    errors = [*unread, *loop_errors(run)]
    if parsed.print_config:
        print_settings(dump_config(run))
        raise_together(errors)
        return None
    if parsed.dry_run:
        from rollgrad.entrypoints.sampling_rehearsal import rehearse_loop

        rehearse_loop(run, errors)
        return None
    from rollgrad.entrypoints.dry_run import eval_file_problems, generation_file_problems

    files = sampling_run(run)
    raise_together([*errors, *generation_file_problems(files), *eval_file_problems(files).values()])
    with results_only_on_stdout():
        from rollgrad.entrypoints.loop import loop

        result = loop(run)
    if result.stopped_by is not None:
        sys.stderr.write("interrupted: the same command goes on from here\n")
    sys.stdout.write(f"{result.model or result.output_dir}\n")
    return result.stopped_by
