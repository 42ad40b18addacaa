"""The least time of a step: what its models multiply, at the speed of one large matrix product; arithmetic only.

It is a floor: attention, sampling one token after the other, the optimizer, communication and waiting come on top.
Does not own: which processes there are (`memory_plan.py`), nor how fast a product is.
"""

from collections.abc import Mapping, Sequence

from attrs import frozen

from rollgrad.application.settings.derived import longest_sample, samples_per_rollout
from rollgrad.application.settings.memory_places import Machine, RoleMemory
from rollgrad.application.settings.model_shape import ModelShape
from rollgrad.application.settings.run import RLConfig

HEAD_PASSES = 4
"""Products with the output embedding for each action token that is trained on: its logits, which the backward pass
computes again, and the gradients of the two factors."""


@frozen(kw_only=True)
class RoleWork:
    """FLOPs of all processes of a role in a step, and the seconds that they take at least, which pass while roles on
    other devices work."""

    role: str
    device: str
    flops: float
    seconds: float


def step_work(
    config: RLConfig, rows: Sequence[RoleMemory], shapes: Mapping[str, ModelShape], speed: float, machine: Machine
) -> list[RoleWork]:
    """Returns what each role computes in a step whose samples are all as long as they may be; nothing where a model
    could not be measured.

    Args:
        config: settings of the run.
        rows: the roles of the run.
        shapes: the model of each role.
        speed: FLOPs a second of a GPU or, where there is none, of a machine, whose processes share it.
        machine: the machine.
    """
    if not all(shapes[row.role].passes for row in rows):
        return []
    found = []
    for row in rows:
        flops = _flops(config, row.role, shapes[row.role])
        parts = row.processes if machine.gpu else row.processes / row.on_a_machine
        device = row.device if machine.gpu else "machine"
        found.append(RoleWork(role=row.role, device=device, flops=flops, seconds=flops / (speed * parts)))
    return found


def least_seconds(work: Sequence[RoleWork]) -> float:
    """Returns the least time of a step: that of the device on which roles work longest, one after the other."""
    devices = {part.device for part in work}
    return max(sum(part.seconds for part in work if part.device == device) for device in devices)


def _flops(config: RLConfig, role: str, shape: ModelShape) -> float:
    assert shape.passes is not None
    samples, longest = samples_per_rollout(config), longest_sample(config)
    actions = samples * min(longest, config.rollout.max_new_tokens)
    prompt = longest - actions // samples
    # A prompt is computed once for all of its samples, but where sequences are computed padded or judged as texts.
    together = role == "reward" or shape.passes.padded
    tokens = samples * longest if together else config.rollout.batch_size * prompt + actions
    body, head = tokens * shape.passes.flops, actions * 2 * shape.embedding
    if role == "reward":
        return body
    if role in ("reference", "engines"):
        return body + head
    # Backward passes have two products for each of the forward pass, one where its weight is not trained.
    frozen_weights = bool(shape.adapters)
    trained = body * (3 - frozen_weights) + tokens * shape.passes.recomputed
    if role == "critic":
        return config.train.max_epochs * trained + body  # the values of all tokens come before
    return config.train.max_epochs * (trained + head * (HEAD_PASSES - frozen_weights))
