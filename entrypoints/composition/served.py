"""References and teachers on servers, in reinforcement learning and in distillation: what each is, and whose."""

from collections.abc import Collection, Mapping
from typing import Any

import structlog
from attrs import frozen

from rollgrad.adapters.checkpoints.fingerprint import Fingerprint
from rollgrad.adapters.engines.vllm_server.teacher import (
    OF_REFERENCE,
    OF_REFERENCES,
    OF_TEACHER,
    OF_TEACHERS,
    ServedModel,
    ServedReference,
    without_teacher,
)
from rollgrad.adapters.models.torch.loading.loading import load_vocabulary_size
from rollgrad.adapters.system.event_loop import run_to_end
from rollgrad.application.settings.kd import TeacherConfig
from rollgrad.application.settings.sections.ref import ServedRefConfig, model_and_url
from rollgrad.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

SERVED_TOLERANCE = 0.05
"""Mean difference in nats of a log-prob that rounding makes between two answers of a server."""
MOST_NAMED = 12
"""Datasources that an error names."""
PROBES = (
    "The 12 quick brown foxes' sum: 3.14 + 2,000 = ?\n\n",
    "def f(x):\n    return x ** 2",
    "Ελλάδα, 你好, मित्र 🙂",
)
"""Texts by which two tokenizers are compared; none with marks of turns, which some servers read as plain text."""


@frozen
class Served:
    """Models on servers, as a reference, and what each server says of its own: by datasource, of all others by None."""

    reference: ServedReference
    models: Mapping[str | None, Mapping[str, Any]]


def make_served(section: ServedRefConfig | TeacherConfig, actor: str, tokenizer: Any) -> Served:
    """Returns the models on the servers of `url` and `urls`, which must answer now. `actor` names the model that is
    trained, or another one whose tokens they have.

    Raises:
        ConfigurationError: a server has other models, or one with other tokens than `tokenizer`.
        EngineError: it does not answer.
    """
    asked, each_asked = (
        (OF_TEACHER, OF_TEACHERS) if isinstance(section, TeacherConfig) else (OF_REFERENCE, OF_REFERENCES)
    )
    name, size = section.model_name_or_path or actor, load_vocabulary_size(actor)
    default: ServedModel | None = None
    models = dict[str | None, Mapping[str, Any]]()
    if section.url is not None:
        default = ServedModel(section.url, name=name, size=size, asked=asked)
        models[None] = check_served(default, name, tokenizer)
    of_datasource = dict[str, ServedModel]()
    for datasource, given in (section.urls or {}).items():
        model, url = model_and_url(given)
        of_datasource[datasource] = served = ServedModel(url, name=model or name, size=size, asked=each_asked)
        models[datasource] = found = check_served(served, model, tokenizer)
        log.info("a teacher was found", datasource=datasource, model=found["id"], url=url)
    return Served(ServedReference(default, of_datasource, complete=run_to_end), models)


def served_fingerprint(served: Served) -> Fingerprint:
    """Returns what servers say of their models, in the place of a fingerprint: whether weights are still the same, what
    they say of an example finds out."""
    told = [("" if name is None else f"{name}=", model) for name, model in served.models.items()]
    return {
        "config": " ".join(f"{name}{model.get('root')}" for name, model in told),
        "weights": " ".join(f"{name}{model['id']}" for name, model in told),
    }


def check_served(served: ServedModel, name: str | None, tokenizer: Any) -> Mapping[str, Any]:
    """Returns what a server says of its model, whose tokens must be those of `tokenizer`, as far as it tells. Warns
    where it has the model by another name than `name`, if that is given.

    Raises:
        ConfigurationError: it has other models, or other tokens.
        EngineError: it does not answer.
    """

    def tokenize(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    model: Mapping[str, Any] = run_to_end(served.checked(PROBES, tokenize))
    if name is not None and name not in (model["id"], model.get("root")):
        log.warning(
            f"the server of {served.asked.url} has {model['id']!r}, which is taken for {name!r}: check that they are "
            "the same model"
        )
    return model


def check_same_weights(differ: float, flag: str) -> None:
    """Checks by how many nats a server's answers differ on average from those that were kept; `flag` names it.

    Raises:
        ConfigurationError: they differ by more than rounding.
    """
    if differ > SERVED_TOLERANCE:
        raise ConfigurationError(
            f"The server of {flag} has other weights than before under the same name: its predictions differ by "
            f"{differ:.3g} nats from those that are kept in --data.cache_dir. Set another --data.cache_dir."
        )


def check_datasources(
    section: ServedRefConfig | TeacherConfig, datasources: Collection[str], setting: str, *, held_out: bool = False
) -> None:
    """Checks that all `datasources` of the rows of `setting` have a teacher, and, unless they are held out, all
    teachers rows.

    Raises:
        ConfigurationError: this is not so.
    """
    if section.urls is None:
        return
    flag = (OF_TEACHERS if isinstance(section, TeacherConfig) else OF_REFERENCES).url
    if section.url is None and (alone := sorted(set(datasources) - section.urls.keys())):
        raise ConfigurationError(without_teacher(alone, section.urls, flag))
    if not held_out and (idle := sorted(section.urls.keys() - set(datasources))):
        raise ConfigurationError(
            f"{flag} names {', '.join(map(repr, idle))}, but the rows of {setting} are of "
            f"{', '.join(map(repr, sorted(datasources)[:MOST_NAMED]))}: correct {flag}, or the column datasource of "
            "the rows."
        )
