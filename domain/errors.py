"""All errors that rollgrad raises on purpose.

Their root is `RollgradError`; each also inherits the built-in error that fits, so callers may catch either. They are
pickled between processes, so their arguments are plain strings. A message says what was set, which rule it breaks and
how to fix it.
"""

from collections.abc import Sequence


class RollgradError(Exception):
    """Root of all errors raised on purpose; the command line prints its message and exits with 2."""


class ConfigurationError(RollgradError, ValueError):
    """A setting, or a combination of settings, breaks a rule."""


class ManyProblemsError(ConfigurationError):
    """Several problems that were found together; the message has one line for each."""


class DataError(RollgradError, ValueError):
    """A dataset is missing, empty, or lacks what the settings ask of it."""


class ImageError(DataError):
    """An image cannot be read, or the model's processor refuses it."""


class FilterError(DataError):
    """A filter of rollouts cannot be understood."""


class RewardError(RollgradError, RuntimeError):
    """A reward source raised, timed out, or returned something that is not one finite number a sample."""


class NotApplicableError(RewardError):
    """The reward does not apply to this reply: a reward function returned None for it."""


class TrajectoryError(RollgradError, ValueError):
    """Tokens, log-probs or segments of a rollout contradict each other."""


class MissingExtraError(RollgradError, ImportError):
    """An optional package is needed for this setting; the message names the extra to install."""


class CheckpointError(RollgradError, OSError):
    """A model or checkpoint cannot be read or written."""


class EngineError(RollgradError, RuntimeError):
    """A rollout engine failed, or did not answer before its deadline."""


class ForeignError(RollgradError, RuntimeError):
    """Code from outside rollgrad failed: an environment, an agent, a tool."""


class NonFiniteUpdateError(RollgradError, FloatingPointError):
    """Loss or gradient norm became NaN or infinite; the step was not applied."""


class ExplodedWeightsError(RollgradError, FloatingPointError):
    """After an optimizer step nothing can be computed with the weights; what was saved before it is all there is."""


class UntrainedParameterError(RollgradError, RuntimeError):
    """A parameter that should be trained has no effect on the model's output; the step was not applied."""


class OutOfMemory(RollgradError, MemoryError):  # noqa: N818 (as torch and Python call it)
    """A device or this machine has too little memory left for a computation."""


class WorkerError(RollgradError, RuntimeError):
    """A process of a model failed; the message names it."""


START_AGAIN = (
    " Start again with --ckpt.resume auto, which continues from the last training state (--ckpt.state_minutes)."
)
"""End of the message of a `LostProcessError`, which is left out where the run goes on by itself."""


class LostProcessError(WorkerError):
    """A process of a model died, or did not answer before its deadline."""


def raise_together(errors: Sequence[RollgradError]) -> None:
    """Raises the only error, or a `ManyProblemsError` if there are several; duplicates count once.

    Raises:
        RollgradError: there is at least one error.
    """
    lines = {line: error for error in errors for line in problem_lines(error)}
    if len(lines) > 1:
        raise ManyProblemsError("\n".join(lines))
    for error in lines.values():
        raise error


def problem_lines(error: RollgradError) -> list[str]:
    """Returns the problems in the error's message, each on one line."""
    texts = str(error).splitlines() if isinstance(error, ManyProblemsError) else [str(error)]
    return [" ".join(text.split()) for text in texts]
