"""`jaxbuf chat`."""

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxbuf.cli import options
from jaxbuf.cli.errors import error_console, print_error
from jaxbuf.cli.session import (
    behind_compilation,
    check_arguments,
    interrupt,
    load_drafter,
    load_model,
    sampling_params,
    write_stream,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from jaxbuf.models.language_model import LanguageModel
    from jaxbuf.serving import Event

HINT = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@options.with_settings
def chat(
    model: options.Model,
    gates: options.Gates = None,
    keep: options.Keep = None,
    system: Annotated[
        str | None, typer.Option(help="An instruction that the conversation starts with.", **options.text())
    ] = None,
    max_new_tokens: options.MaxNewTokens = 512,
    limit: options.Limit = 16,
    form: options.Form = "auto",
    state_dtype: options.StateDtype = None,
    dtype: options.Dtype = None,
    *,
    sampling: dict[str, Any],
    drafting: dict[str, Any],
) -> None:
    """Talk to a model: each line is a message, and its answer streams to standard output.

    The checkpoint needs a chat template (chat_template.jinja or tokenizer_config.json); demo has none.
    /reset forgets the conversation (not --system), /exit or the end of input leaves.
    Ctrl-C stops an answer and keeps what was said.
    The checkpoint's generation_config.json gives the sampling settings that you don't; without one it is greedy.

    [bold]Examples[/bold]

      jaxbuf chat --model ./checkpoint

      jaxbuf chat --model ./checkpoint --system "Answer in one sentence." --temperature 0.7 --top-p 0.9

      jaxbuf chat --model ./checkpoint --drafter mtp --adaptive-drafts
    """
    err = error_console()
    shared = {"limit": limit, "form": form, "state_dtype": state_dtype}
    check_arguments(sampling, drafting, max_new_tokens=max_new_tokens, **shared)
    lm = load_model(err, model, dtype, gates, keep)
    if lm.chat_template is not None and lm.tokenizer is None:
        raise ValueError(
            f"the model {lm.name!r} has no tokenizer.json, which a conversation needs; `jaxbuf generate --token-ids` "
            "continues token ids"
        )
    stops = (*sampling.pop("stop_token_ids", ()), *_end_of_turn(lm))
    params = sampling_params(err, lm, sampling, stop_token_ids=stops)
    settings = shared | {"sampling": params} | load_drafter(err, drafting, dtype)
    conversation = Conversation(lm, system, max_new_tokens, settings)
    conversation.check()
    _converse(err, conversation)


@dataclasses.dataclass
class Conversation:
    """What was said, and how answers are generated: `settings` goes to `jaxbuf.generate`."""

    lm: "LanguageModel"
    system: str | None
    max_new_tokens: int
    settings: dict[str, Any]

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Back to the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def check(self) -> None:
        """Raises now what any first message would meet: no template, or a setting out of range."""
        # The arguments are checked at once, and nothing is generated until the stream is read.
        self._stream(self._encode("Hello"), self.max_new_tokens)

    def answer(self, err: Console, text: str) -> None:
        """Streams the answer to a message and adds both; an error adds neither.

        Raises:
          ValueError: The conversation would not fit the context, or the template refuses it.
        """
        prompt = self._encode(text)
        room = self.lm.max_length - len(prompt)
        if room < 1:
            raise ValueError(
                f"with this message the conversation ({len(prompt)} tokens) fills the model's context "
                f"({self.lm.max_length}); the message was not added: send a shorter one, or /reset"
            )
        answer, cut = "", None
        with interrupt() as interrupted:
            events = self._stream(prompt, min(self.max_new_tokens, room))
            if err.is_terminal:
                events = behind_compilation(err, events, interrupted)
            for event in write_stream(events, interrupted):
                answer += event.text
                if event.done and event.result.finish_reason == "length":
                    cut = event.result.stats.new_tokens
        if cut is not None:  # behind the newline that ends the answer
            err.print(f"the answer was cut at {cut} tokens", style="dim")
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _stream(self, prompt: list[int], max_new_tokens: int) -> "Generator[Event, None, None]":
        import jaxbuf

        return jaxbuf.generate(self.lm, [prompt], max_new_tokens, stream=True, **self.settings)

    def _encode(self, text: str) -> list[int]:
        prompt = self.lm.chat([*self.messages, {"role": "user", "content": text}])
        return self.lm.encode(prompt, add_special_tokens=False)


def _converse(err: Console, conversation: Conversation) -> None:
    stdin = typer.get_binary_stream("stdin")
    terminal = stdin.isatty()
    encoding = (terminal and getattr(sys.stdin, "encoding", None)) or "utf-8"
    if terminal:
        err.print(HINT, style="dim")
    while True:
        if terminal:
            err.print("> ", end="", style="bold")
        try:
            line = stdin.readline()
        except KeyboardInterrupt:
            err.print(f"\n{HINT}", style="dim")
            continue
        try:
            text = line.decode(encoding).strip()
        except UnicodeDecodeError as error:
            print_error(err, f"this line is not UTF-8 text, and is left out: {error}")
            continue
        if not line or text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text:
            try:
                conversation.answer(err, text)
            except ValueError as error:
                print_error(err, str(error))


def _end_of_turn(lm: "LanguageModel") -> tuple[int, ...]:
    """The tokenizer's own end token: in chat models often another than config.json's, which ends a document."""
    token = lm.chat_template.special_tokens.get("eos_token") if lm.chat_template else None
    found = lm.tokenizer.token_to_id(token) if token and lm.tokenizer else None
    return () if found is None else (found,)
