"""Models whose distributions a policy is compared with, in the process of the policy."""

from typing import Any

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.models.torch.distillation import DistillationSettings, Teacher
from rollgrad.adapters.models.torch.loading import load_tokenizer
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.composition.models import make_reference_model

REFERENCE_FLAG = "--ref.model_name_or_path"


def check_vocabulary(teacher: Any, student: Any, name: str, *, flag: str) -> None:
    """Checks that a token means the same to both tokenizers. `flag` names the teacher.

    Raises:
        ConfigurationError: their vocabularies differ.
    """
    its, own = teacher.get_vocab(), student.get_vocab()
    if its == own:
        return
    differing = sorted(token for token in its.keys() | own.keys() if its.get(token) != own.get(token))
    example = differing[0]
    raise ConfigurationError(
        f"The teacher {name!r} has another vocabulary than the actor: {len(differing)} tokens differ, such as "
        f"{example!r} (token {its.get(example, 'none')} of the teacher, {own.get(example, 'none')} of the actor), so "
        f"that their predictions cannot be compared: set {flag} to a model with the actor's tokenizer."
    )


def check_compared(name: str, tokenizer: Any) -> None:
    """Checks that the reference `name` has the vocabulary of `tokenizer`, over which the policy is compared with it.

    Raises:
        CheckpointError: it has no tokenizer.
        ConfigurationError: it has another vocabulary.
    """
    check_vocabulary(load_tokenizer(name, flag=REFERENCE_FLAG), tokenizer, name, flag=REFERENCE_FLAG)


def make_compared_reference(config: RLConfig, tokenizer: Any, images: ImageRenderer | None = None) -> Teacher:
    """Loads the reference of a run of reinforcement learning whose policy is compared with it over the vocabulary;
    `images` renders the images that it sees.

    Raises:
        CheckpointError: it cannot be loaded.
        ConfigurationError: it has another vocabulary.
    """
    if config.ref.model_name_or_path is not None:
        check_compared(config.ref.model_name_or_path, tokenizer)
    kl = config.algo.kl
    settings = DistillationSettings(beta=kl.beta, temperature=config.rollout.temperature, top_k=kl.top_k)
    return Teacher(make_reference_model(config.actor, config.ref, images=images), settings)
