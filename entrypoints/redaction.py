"""Secrets stay out of what a command prints.

A secret is the value of a flag, setting or environment variable whose name says so (`is_secret_name`), the user and
password of a URL, or an Authorization header. `redacted_output` stands between every command and its two streams.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TextIO, cast

HIDDEN = "***"

SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials", "authorization", "bearer"}
)
"""A name that ends with one of these words holds a secret, whatever comes before it."""

SECRET_NAMES = frozenset({"use_wandb", "wandb"})
"""Names without such a word that take one: OpenRLHF's --use_wandb takes the API key of Weights & Biases."""

COLUMNS = frozenset(
    {
        "steps",
        "labels",
        "input",
        "label",
        "image",
        "video",
        "prompt",
        "output",
        "answer",
        "chosen",
        "rejected",
        "messages",
        "rubric",
        "fn",
        "metric",
        "response",
        "tools",
        "thinking",
    }
)
"""Words before `key` in names of columns and metrics: input_key, label_key, reward_fn_key, best_metric_key."""

TOKENISER_WORDS = frozenset({"eos", "bos", "pad", "unk", "mask", "per", "stop", "special"})
"""Words before `token` in names of tokens of text: eos_token, reward_per_token."""

NOT_SECRET = frozenset({"", "true", "false", "none", "null", "auto", "yes", "no", "bearer", "basic", "token"})
"""Values of secrets' names that are not secrets."""

LEAST_LENGTH = 4
"""Least length of a secret that is hidden wherever it occurs; a shorter one may be part of an ordinary word."""

LEAST_VARIABLE_LENGTH = 8
"""Least length of a secret in an environment variable, most of which have nothing to do with the command."""

SURE_LENGTH = 16
"""Least length of a secret that is also hidden where letters touch it, such as those of a colour code, of an escaped
line end in quoted text, or of an address: no part of an ordinary word is as long."""

# Names begin where no other could go on: a search from each of their letters would take the square of their length.
_ASSIGNMENT = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*[=:]\s*["']?([^\s"',}&]+)""")
_URL = re.compile(r"""(?<![\w+.-])([\w+.-]+://)[^/\s'"@:]*:[^/\s'"]*@""")
_PASSWORD = re.compile(r"""://[^/\s'"@:]*:([^/\s'"]+)@""")
_WEB_USER = re.compile(r"""(https?://)[^/\s'"@]+@""")
_QUERY = re.compile(r"""[?&]([\w.-]+)=([^\s"',}&#]+)""")
_HEADER = re.compile(r"""(Authorization["']?\s*[:=]\s*["']?(?:(?:Bearer|Basic|Token)\s+)?)([^\s"',}]+)""")
_BEARER = re.compile(r"(Bearer\s+)[^\s\"',}]{8,}")
_NAMED = re.compile(
    r"""((?:[?&][\w-]*(?:key|token|secret|password)=|
        (?<![\w.-])[\w.-]*(?:api|access|secret|private|auth|wandb|hub|hf)[_-]?(?:key|token)["']?\s*[=:]\s*["']?|
        (?<![\w.-])[\w.-]*(?:secret|password|passwd)["']?\s*[=:]\s*["']?))[^\s"',}&]+""",
    re.VERBOSE | re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Returns whether the value of a flag, setting or environment variable of that name is a secret.

    >>> [is_secret_name(name) for name in ("wandb_api_key", "hf-token", "db.password", "--use_wandb")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("data.label_key", "train.max_tokens", "--token_file", "eos_token")]
    [False, False, False, False]
    """
    bare = name.lstrip("-+").lower().replace("-", "_")
    before, word = ["", *re.split(r"[._]", bare)][-2:]
    if (word == "key" and before in COLUMNS) or (word == "token" and before in TOKENISER_WORDS):
        return False
    return word in SECRET_WORDS or bare in SECRET_NAMES


def secrets_of_arguments(arguments: Sequence[str]) -> set[str]:
    """Returns the secrets on a command line, as `--name value`, `--name=value`, `NAME=value`, in URLs, headers and JSON
    within a word."""
    found: set[str] = set()
    words = [part for word in arguments for part in _words(word)]
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("-") and "=" not in word and is_secret_name(word) and not following.startswith("--"):
            found.add(following)
    for word in (*arguments, *words):
        found.update(value for name, value in _ASSIGNMENT.findall(word) if is_secret_name(name))
        found.update(value for _, value in _HEADER.findall(word))
        found |= _secrets_of_url(word)
    return {secret for secret in found if _is_hidden(secret, LEAST_LENGTH)}


def secrets_of_settings(data: Any, name: str = "") -> set[str]:
    """Returns the secrets in nested mappings and lists, as YAML gives them, those of URLs too."""
    if isinstance(data, Mapping):
        return {secret for key, value in data.items() for secret in secrets_of_settings(value, str(key))}
    if isinstance(data, list | tuple):
        return {secret for value in data for secret in secrets_of_settings(value, name)}
    found = _secrets_of_url(data) if isinstance(data, str) else set()
    if data is not None and is_secret_name(name):
        found.add(str(data))
    return {secret for secret in found if _is_hidden(secret, LEAST_LENGTH)}


def _secrets_of_url(text: str) -> set[str]:
    """Returns the passwords of URLs in a text, and the values of their queries whose names say that they are secret."""
    return {*_PASSWORD.findall(text), *(value for name, value in _QUERY.findall(text) if is_secret_name(name))}


def secrets_of_environment(variables: Mapping[str, str]) -> set[str]:
    """Returns the secrets in environment variables."""
    return {
        value
        for name, value in variables.items()
        if is_secret_name(name) and _is_hidden(value, LEAST_VARIABLE_LENGTH) and not value.isdigit()
    }


def known_secrets() -> set[str]:
    """Returns the secrets in environment variables, and those that the streams of a command hide."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, RedactedStream)]
    return secrets_of_environment(os.environ).union(*(stream.secrets for stream in streams))


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns the text with `***` for each of the secrets, for users and passwords in URLs, and for what follows the
    name of a secret.

    >>> redact("POST http://me:pass@host/?api_key=k1 as hunter2", {"hunter2"})
    'POST http://***@host/?api_key=*** as ***'
    """
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(_pattern(secret), HIDDEN, text)
    text = _URL.sub(rf"\1{HIDDEN}@", text)
    text = _WEB_USER.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return _NAMED.sub(rf"\1{HIDDEN}", text)


def secret_spans(text: str, secrets: Iterable[str]) -> list[tuple[int, int]]:
    """Returns the parts (start, stop) of a text that hold one of the secrets, what follows `Authorization:`, or a
    password in a URL; in order, none within another.

    >>> secret_spans("the hunter2 of http://me:pass@host", {"hunter2"})
    [(4, 11), (22, 30)]
    """
    found = [match.span() for secret in secrets if secret in text for match in re.finditer(_pattern(secret), text)]
    for pattern, mark in ((_HEADER, "Authorization"), (_URL, "://")):
        if mark in text:
            found += [(match.end(1), match.end()) for match in pattern.finditer(text)]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


class OutputClosedError(OSError):  # no BrokenPipeError, at which rich would end the process with status 1
    """The reader of the command's output has closed it (`rollgrad ... | head`)."""


class RedactedStream:
    """A text stream that hides secrets; all but writing is the wrapped stream's own."""

    def __init__(self, stream: TextIO, secrets: set[str]) -> None:
        self.stream = stream
        self.secrets = secrets

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes the text without its secrets; returns the length of the text.

        Raises:
            OutputClosedError: the reader is gone.
        """
        try:
            self.stream.write(redact(text, self.secrets))
        except BrokenPipeError as error:
            raise self._closed() from error
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the wrapped stream.

        Raises:
            OutputClosedError: the reader is gone.
        """
        try:
            self.stream.flush()
        except BrokenPipeError as error:
            raise self._closed() from error

    def _closed(self) -> OutputClosedError:
        """Points the stream at nothing, or the interpreter would fail to flush it when it exits."""
        with contextlib.suppress(OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)
        return OutputClosedError()


@contextlib.contextmanager
def redacted_output(arguments: Sequence[str]) -> Iterator[None]:
    """Hides the secrets of a command line and of the environment in all that is printed within. What is printed to a
    stream that was closed before (`rollgrad ... >&-`) is lost."""
    secrets = secrets_of_arguments(arguments) | secrets_of_environment(os.environ)
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:  # in the place of a closed stream, whose number is the lowest that is free
        streams = [stream or opened.enter_context(open(os.devnull, "w")) for stream in before]
        sys.stdout, sys.stderr = (cast(TextIO, RedactedStream(stream, secrets)) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def hide(secrets: Iterable[str]) -> None:
    """Hides more secrets for as long as the command runs, those of its configuration file, say."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RedactedStream):
            stream.secrets.update(secrets)


def print_settings(text: str) -> None:
    """Prints settings to stdout, and before that to stderr whether secrets in them are hidden.

    Raises:
        OutputClosedError: the reader is gone.
    """
    sys.stderr.write(hidden_note(text))
    sys.stdout.write(text)
    sys.stdout.flush()


def hidden_note(text: str) -> str:
    """Returns a line that says that secrets in a text that is printed are hidden; empty if it holds none."""
    secrets = sys.stdout.secrets if isinstance(sys.stdout, RedactedStream) else set()
    return (
        f"secrets are printed as {HIDDEN}: put them back where you use this\n" if redact(text, secrets) != text else ""
    )


def _pattern(secret: str) -> str:
    """Returns the regular expression of a secret where it is hidden."""
    exact = re.escape(secret)
    return exact if len(secret) >= SURE_LENGTH else rf"(?:(?<!\w)|(?<=\\[nrt])){exact}(?!\w)"


def _words(word: str) -> list[str]:
    """Returns a word, or the words of a command that is quoted as one."""
    if len(word.split()) < 2:
        return [word]
    try:
        return shlex.split(word.replace("\\\n", " "))
    except ValueError:
        return word.split()


def _is_hidden(secret: str, least: int) -> bool:
    return len(secret) >= least and secret.lower() not in NOT_SECRET
