"""The section `ref`: the frozen reference, which in reinforcement learning a server may have."""

from collections.abc import Iterator, Mapping

from attrs import define

from rollgrad.application.settings.sections.cluster import IN_CLUSTER
from rollgrad.domain.addresses import address_problem
from rollgrad.domain.settings import COUNT, setting


@define(kw_only=True)
class RefConfig:
    """The frozen reference that KL is measured against."""

    model_name_or_path: str | None = setting(None, "Model of the reference; default: the actor's starting point.")
    num_nodes: int | None = setting(
        None, "Machines that hold the reference; default: as many as the actor's.", COUNT, only_if=IN_CLUSTER
    )
    num_gpus_per_node: int | None = setting(
        None,
        "Processes on each of them; default: as many as the actor's.",
        COUNT,
        only_if=IN_CLUSTER,
    )
    offload: bool = setting(
        False,
        "Divide the reference over its processes, in the CPU's memory: each layer is fetched when it computes.",
        only_if=IN_CLUSTER,
    )


@define(kw_only=True)
class ServedRefConfig(RefConfig):
    """The frozen reference that KL is measured against, or the teacher."""

    url: str | None = setting(
        None,
        "Address of a server that has the reference, http://host:8000, such as `vllm serve`. It is asked for the "
        "log-probs of replies or, with the full estimator, for its most likely tokens. Of ref.model_name_or_path (by "
        "default the actor's) only tokenizer and configuration are read. The environment variable "
        "ROLLGRAD_ENGINE_TOKEN is sent as a bearer token.",
    )
    urls: dict[str, str] | None = setting(
        None,
        "Addresses of servers, each with the teacher for the prompts of one datasource: --ref.urls math "
        "http://one:8000 code http://two:8000. Prompts of other datasources have ref.url's. Where a server has several"
        " models, MODEL@http://two:8000 names one.",
    )

    @property
    def served(self) -> bool:
        """Whether servers have it."""
        return self.url is not None or self.urls is not None


def model_and_url(given: str) -> tuple[str | None, str]:
    """Returns what an entry of `urls` says: a model of the server, or None, and the server's address."""
    model, at, scheme = given.partition("@http")
    return (model, f"http{scheme}") if at else (None, given)


def served_problems(section: str, url: str | None, urls: Mapping[str, str] | None) -> Iterator[str]:
    """Yields what is wrong with the addresses of servers in a section that has `url` and `urls`."""
    if url is not None and (problem := address_problem(url, f"{section}.url")) is not None:
        yield problem
    for datasource, given in (urls or {}).items():
        if (problem := address_problem(model_and_url(given)[1], f"{section}.urls")) is not None:
            yield f"Of {datasource!r}: {problem}"
    if urls == {}:
        yield f"{section}.urls names no server: write --{section}.urls DATASOURCE http://HOST:PORT, or leave it out."
