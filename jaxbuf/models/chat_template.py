"""Chat templates: from a conversation to the prompt that a model was trained to answer.

A template is a program that came with a checkpoint. It runs in jinja2's sandbox, which has no access to Python's
internals and cannot change what it is given.
"""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxbuf.models.loading.fields import Fields, is_there, read_fields, read_text

TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

type Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and the variables that its tokenizer's configuration gives it.

    Attributes:
      source: The template in Jinja.
      origin: The file that it is from, for messages.
      special_tokens: "bos_token", "eos_token" and so on, those that are set.
    """

    source: str
    origin: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; arguments and errors as in `LanguageModel.chat`."""
        shaped = isinstance(messages, Sequence) and all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
        )
        if not messages or not shaped:
            raise ValueError(f'messages must be a list of {{"role": ..., "content": ...}}, not empty, got {messages!r}')
        variables = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            template = _environment().from_string(self.source)
            return template.render(messages=messages, **variables, **self.special_tokens)
        except Exception as error:  # a template is a program, and may raise anything
            raise ValueError(f"the chat template of {self.origin} failed: {error}") from error


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of a model's directory: chat_template.jinja, or else tokenizer_config.json's chat_template.

    Where tokenizer_config.json names several, it is the one named "default".

    Raises:
      CheckpointError: A file cannot be read, a special token is neither a text nor an object with one, or
        chat_template is not a text or a list of named ones.
    """
    file = directory / TOKENIZER_CONFIG
    config = read_fields(file) if is_there(file) else Fields({}, file)
    special = {name: _text_of(config, name) for name in SPECIAL_TOKENS if config.values.get(name) not in (None, "")}
    separate = directory / TEMPLATE
    if is_there(separate):
        return ChatTemplate(read_text(separate), str(separate), special)
    if not config.has("chat_template"):
        return None
    found = config.values["chat_template"]
    if isinstance(found, list):
        named = {each.text("name"): each.text("template") for each in config.items("chat_template")}
        if "default" not in named:
            raise config.error(f'no chat_template is named "default", only {", ".join(named) or "none"}')
        found = named["default"]
    if not isinstance(found, str):
        config.fail("chat_template", "a text or a list of named ones")
    return ChatTemplate(found, str(file), special)


def _text_of(config: Fields, name: str) -> str:
    """Special tokens are texts, or objects that hold one as their content."""
    if isinstance(config.values[name], str):
        return config.text(name)
    if isinstance(config.values[name], dict):
        return config.nested(name).text("content")
    config.fail(name, 'a text or an object with its "content"')


def _environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's templates are written for: its whitespace, filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter of this name escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
