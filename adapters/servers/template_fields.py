"""Fields of a body that set variables of the chat template: refused where the server renders otherwise.

Invariant: all requests of a server are rendered alike, as in training. Does not own: templates (`adapters/chat`).
"""

import json
from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.servers.unread import UnreadFields
from rollgrad.adapters.servers.wire import Wire, bad, read
from rollgrad.domain.ports.chat_codec import ChatCodec

VARIABLES = "chat_template_kwargs"
"""Field with variables of the template, as clients of vLLM send them."""
THINKING = "enable_thinking"
"""Variable of the template that clients of Qwen's own service set beside the others."""
EFFORT = "reasoning_effort"
"""Variable of chat templates, and field of chat completions, that says how long a model is to think."""
EFFORTS = ("reasoning", "output_config")
"""Objects of responses and of Anthropic's messages that hold it as `effort`."""


class TemplateFields:
    """Checks bodies against the variables with which `codec` renders.

    Args:
        codec: renders all requests.
        unread: is told of an effort that the template does not read.
    """

    def __init__(self, codec: ChatCodec, unread: UnreadFields) -> None:
        self._variables, self._reads, self._unread = codec.template_kwargs, codec.reads, unread

    def check(self, wire: Wire, body: Mapping[str, Any]) -> None:
        """Checks the body of a request.

        Raises:
            HttpError: it sets a variable that is not the server's own: the model would be shown another text than the
                client thinks, and than in training. For a model whose template reads an effort, that is one of them.
        """
        thinking = {} if body.get(THINKING) is None else {THINKING: body[THINKING]}
        self._check(VARIABLES, {**read(body, VARIABLES, dict, {}), **thinking})
        if "messages" in wire.fields or "input" in wire.fields:
            self._check_effort(body)

    def _check(self, field: str, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if name not in self._variables or self._variables[name] != value:
                raise bad(
                    f"chat_template_kwargs sets {name[:60]!r} to {json.dumps(value)[:60]}, but all requests are "
                    "rendered alike here: start the server with --chat_template_kwargs, or the run with "
                    "--data.chat_template_kwargs, or leave it out.",
                    param=field,
                )

    def _check_effort(self, body: Mapping[str, Any]) -> None:
        named = {EFFORT: body.get(EFFORT)}
        named |= {f"{name}.effort": read(body, name, dict, {}).get("effort") for name in EFFORTS}
        for field, effort in named.items():
            if effort and self._reads(EFFORT):
                self._check(field, {EFFORT: effort})
            elif effort:
                self._unread.note([EFFORT])
