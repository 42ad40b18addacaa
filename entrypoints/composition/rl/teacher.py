"""Models whose distributions a policy is compared with, in the process of the policy; and what a teacher is told."""

from typing import Any

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.teacher_template import PASSED_ANSWER, PASSED_REPLY, TeacherTemplate, Telling
from rollgrad.adapters.engines.vllm_server.teacher import ServedReference
from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, KeptTeacher, Teacher
from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.application.learning.teacher_prompts import TellsTeacher, ToldOfReplies, told_by_rows
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.models import make_reference_model
from rollgrad.entrypoints.composition.rl.algorithm import teacher_kind
from rollgrad.entrypoints.composition.served import make_served
from rollgrad.entrypoints.composition.vocabulary import check_vocabulary

REFERENCE_FLAG = "--ref.model_name_or_path"


def check_compared(name: str, tokenizer: Any) -> None:
    """Checks that the reference `name` has the vocabulary of `tokenizer`, over which the policy is compared with it.

    Raises:
        CheckpointError: it has no tokenizer.
        ConfigurationError: it has another vocabulary.
    """
    check_vocabulary(load_tokenizer(name, flag=REFERENCE_FLAG), tokenizer, name, flag=REFERENCE_FLAG)


def make_policy_teacher(
    config: RLConfig, tokenizer: Any, images: ImageRenderer | None = None
) -> Teacher | KeptTeacher | None:
    """Returns what updates compare the policy's distributions with: the reference of the run, which is loaded, what it
    predicts before, or nothing. `images` renders the images that the reference sees.

    Raises:
        CheckpointError: the reference cannot be loaded.
        ConfigurationError: it has another vocabulary.
    """
    kind = teacher_kind(config)
    if kind == "none":
        return None
    return (
        KeptTeacher(_divergence(config)) if kind == "predicted" else make_compared_reference(config, tokenizer, images)
    )


def make_compared_reference(config: RLConfig, tokenizer: Any, images: ImageRenderer | None = None) -> Teacher:
    """Loads the reference of a run, which updates compare the policy with; raises what `make_policy_teacher` does."""
    if config.ref.model_name_or_path is not None:
        check_compared(config.ref.model_name_or_path, tokenizer)
    return Teacher(make_reference_model(config.actor, config.ref, images=images), _divergence(config))


def _divergence(config: RLConfig) -> DistillationSettings:
    kl = config.algo.kl
    return DistillationSettings(beta=kl.beta, temperature=config.rollout.temperature, top_k=kl.top_k)


def make_served_reference(config: RLConfig, tokenizer: Any) -> ServedReference:
    """Returns the references on the servers of `ref.url` and `ref.urls`; raises what `make_served` does."""
    return make_served(config.ref, config.actor.model_name_or_path, tokenizer).reference


def make_tells_teacher(config: RLConfig, codec: TemplateCodec, judged: bool) -> TellsTeacher:
    """Returns what says, of each rollout, what the reference reads in the place of its prompt. `judged`: whether a
    reward judges replies.

    Raises:
        ConfigurationError: the template names what nothing finds.
    """
    given, samples = config.algo.kl.teacher_template, config.rollout.n_samples_per_prompt
    template = None if given is None else TeacherTemplate.read(given)
    if template is None or not template.judged:
        return told_by_rows
    tells = f"algo.kl.teacher_template tells {' and '.join(f'{{{name}}}' for name in sorted(template.judged))}"
    if not judged:
        raise ConfigurationError(
            f"{tells}, which a reward finds, but there is none: set --reward.verifier, --reward.function_path, "
            "--reward.model_name_or_path, --reward.remote_url or --reward.judge_url."
        )
    passed = sorted({PASSED_REPLY, PASSED_ANSWER} & template.judged)
    if samples < 2 and passed:
        raise ConfigurationError(
            f"{tells}, but rollout.n_samples_per_prompt is {samples}, so that no other reply to a prompt can have "
            f"passed: set --rollout.n_samples_per_prompt to 2 or more, or leave "
            f"{' and '.join(f'{{{name}}}' for name in passed)} out."
        )
    return ToldOfReplies(
        tell=Telling(template, codec, longest=config.rollout.max_new_tokens),
        decode=codec.decode,
        pass_threshold=config.reward.pass_threshold,
    )
