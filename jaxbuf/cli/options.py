"""Options that several commands take, each declared once."""

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jaxbuf.terminal import parse_number, parse_whole


def _typed(parse: Callable[..., Any], *limits: Any) -> Callable[[Any], Any]:
    """A parser of an option: what it says is wrong gets the option's name."""

    def parser(text: Any) -> Any:
        if not isinstance(text, str):  # a default
            return text
        try:
            return parse(text, *limits)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def whole(*limits: int) -> dict[str, Any]:
    """Settings of an option that takes a whole number, with its least and its most."""
    return {"parser": _typed(parse_whole, *limits), "metavar": "INTEGER"}


def number() -> dict[str, Any]:
    """Settings of an option that takes a finite number."""
    return {"parser": _typed(parse_number), "metavar": "NUMBER"}


def check_text(text: str) -> str:
    """The text, if it was UTF-8 on the command line.

    Raises:
      ValueError: It holds other bytes, which Python has as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"must be UTF-8 text, got {text!r}") from None
    return text


def text() -> dict[str, Any]:
    """Settings of an option that takes text; a file's name may hold other bytes."""
    return {"parser": _typed(check_text)}


Model = Annotated[
    str, typer.Option(help="[bold]demo[/bold], the embedded model, or a checkpoint's directory or Hugging Face id.")
]
Texts = Annotated[
    list[str] | None,
    typer.Argument(
        help="Texts in UTF-8, or a .npy of token ids; none: the modules of this Python's standard library.",
        metavar="[FILE...]",
        show_default=False,
    ),
]
Gates = Annotated[
    Path | None,
    typer.Option(
        help="A file of gates from jaxbuf train-gate, or [bold]demo[/bold], the embedded model's: softmax layers keep "
        "the keys that these admit, not all.",
        show_default=False,
    ),
]
Keep = Annotated[
    float | None,
    typer.Option(
        help="With --gates: for which share of the keys that a request's memory could hold (prompt and new tokens, "
        "rounded up to powers of two), of all heads of a layer together, there are pages behind the window. When they "
        "are full, the keys of the lowest gates leave. By default all.",
        show_default=False,
        **number(),
    ),
]
DtypeName = Literal["float32", "bfloat16", "float16"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(help="float32, bfloat16 or float16; by default what suits the device and the checkpoint."),
]
MaxNewTokens = Annotated[int, typer.Option(help="How many tokens to generate at most.", **whole(1))]
Limit = Annotated[
    int, typer.Option(help="How many entries the recurrent state's buffer holds before a fold.", **whole(1))
]
Rows = Annotated[int, typer.Option(help="Requests that are continued at once.", **whole(1))]
PromptTokens = Annotated[int, typer.Option(help="Tokens of the longest prompt.", **whole(1))]
OwnDrafter = Annotated[Literal["none", "ngram", "mtp"], typer.Option(help="Who drafts tokens that a step verifies.")]
OwnDraftTokens = Annotated[int, typer.Option(help="Draft tokens of a step.", **whole(1))]
FixedForm = Annotated[Literal["recurrent", "buffered", "kv"], typer.Option(help="How recurrent layers hold a request.")]
TokenIds = Annotated[
    bool,
    typer.Option(
        "--token-ids",
        help="Read and write token ids in place of text, as a model without a tokenizer needs it: whole numbers, "
        "separated by spaces, line breaks or commas.",
    ),
]
StateDtypeName = Literal["float32", "bfloat16", "split", "split8"]
StateDtype = Annotated[
    StateDtypeName | None,
    typer.Option(
        help="How recurrent states are kept between folds: float32; bfloat16, which drifts; split, two bfloat16 "
        "numbers of which a step reads one, without drift; or split8, the second of which is an int8. By default "
        "float32."
    ),
]
Form = Annotated[
    Literal["auto", "recurrent", "buffered", "kv"],
    typer.Option(
        help="auto, recurrent (the state is written every step), buffered (only when the buffer fills), or kv (as "
        "buffered, but without a state as long as a text is short)."
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        help="How many samples of the continuation to draw, from as many seeds in a row. The prompt is read once and "
        "they share its memory; they differ with a --temperature above 0. They are printed when all are done.",
        **whole(1, 1024),
    ),
]
Beams = Annotated[
    int | None,
    typer.Option(
        help="Search the most probable continuations with this many beams, in place of sampling, and print as many, "
        "best first. More beams usually find more probable texts, which need not be better ones.",
        show_default=False,
        **whole(),
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        help="With --beams: ranks them by log-probability / length ^ this; 0 favours short ones, 1 ranks by the mean.",
        show_default="1.0",
        **number(),
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(help="A directory to write a jax.profiler trace of the generation to.", show_default=False),
]


def _sampling_option(help: str, *names: str, **settings):
    return typer.Option(*names, help=help, rich_help_panel="Sampling", show_default=False, **settings)


SAMPLING = {
    "temperature": Annotated[
        float | None,
        _sampling_option("Divides the logits; 0 takes the most likely token each time (greedy).", **number()),
    ],
    "top_k": Annotated[
        int | None, _sampling_option("Sample among the k most likely tokens; 0 does not restrict.", **whole())
    ],
    "top_p": Annotated[
        float | None, _sampling_option("Sample among the likeliest tokens of this total probability.", **number())
    ],
    "min_p": Annotated[
        float | None, _sampling_option("Leave out tokens less than this times as likely as the likeliest.", **number())
    ],
    "seed": Annotated[
        int | None,
        _sampling_option(
            "The same seed, shapes and device give the same tokens; below 2^32, 0 if unset.", **whole(0, 2**32 - 1)
        ),
    ],
    "repetition_penalty": Annotated[
        float | None,
        _sampling_option("Above 1 makes every token that occurred, in the prompt too, less likely.", **number()),
    ],
    "presence_penalty": Annotated[
        float | None, _sampling_option("Subtracted from the logit of every token generated before.", **number())
    ],
    "frequency_penalty": Annotated[
        float | None, _sampling_option("Subtracted from a token's logit for each time it was generated.", **number())
    ],
    "logit_bias": Annotated[
        list[str] | None,
        _sampling_option("Added to the logit of a token id, -inf forbids it; may be repeated.", metavar="ID=BIAS"),
    ],
    "min_tokens": Annotated[int | None, _sampling_option("Stop at no stop token before this many tokens.", **whole())],
    "ignore_eos": Annotated[bool | None, _sampling_option("Go on past the model's own end tokens.", "--ignore-eos")],
    "stop": Annotated[
        list[str] | None,
        _sampling_option("Stop at this text, which is not printed; may be repeated.", metavar="TEXT", **text()),
    ],
    "stop_token_id": Annotated[
        list[int] | None,
        _sampling_option("Stop at this token, beside the model's own end tokens; may be repeated.", **whole(0)),
    ],
}


def _drafting_option(help: str, *names: str, default: str | None = None, **settings):
    return typer.Option(*names, help=help, rich_help_panel="Drafts", show_default=default or False, **settings)


DRAFTING = {
    "drafter": Annotated[
        str | None,
        _drafting_option(
            "Who drafts tokens that the model then checks all at once: [bold]ngram[/bold] (repetition in the text), "
            "[bold]mtp[/bold] (the model's own MTP layer), or another model as in --model, of the same vocabulary."
        ),
    ],
    "draft_tokens": Annotated[
        int | None,
        _drafting_option("How many tokens are drafted at most at a time, from 1 to 15.", default="4", **whole(1, 15)),
    ],
    "branches": Annotated[
        int | None,
        _drafting_option(
            "With ngram or mtp, draft a tree: ngram follows this many earlier places at once, mtp takes this many "
            "candidates for the next tokens. All of them count as --draft-tokens.",
            default="1",
            **whole(),
        ),
    ],
    "adaptive_drafts": Annotated[
        bool | None,
        _drafting_option(
            "Draft only as many tokens as pay by what was kept of the drafts so far, and none where none do.",
            "--adaptive-drafts",
        ),
    ],
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `SAMPLING` and `DRAFTING`: those that were given reach it as its arguments
    `sampling` and `drafting`, each a dict."""
    groups = {"sampling": SAMPLING, "drafting": DRAFTING}

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        for group, options in groups.items():
            values = {name: arguments.pop(name) for name in options}
            arguments[group] = {name: value for name, value in values.items() if value not in (None, [], ())}
        sampling = arguments["sampling"]
        if "logit_bias" in sampling:
            sampling["logit_bias"] = _parse_biases(sampling["logit_bias"])
        if "stop_token_id" in sampling:
            sampling["stop_token_ids"] = tuple(sampling.pop("stop_token_id"))
        command(**arguments)

    own = inspect.signature(command).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, kind, default=None, annotation=option)
        for options in groups.values()
        for name, option in options.items()
    ]
    parameters = [*(parameter for parameter in own if parameter.name not in groups), *added]
    wrapped.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return wrapped


def _parse_biases(texts: list[str]) -> dict[int, float]:
    biases = {}
    for given in texts:
        token, equals, bias = given.partition("=")
        try:
            if not equals:
                raise ValueError("must be ID=BIAS, a token id and a number")
            biases[parse_whole(token)] = -math.inf if bias.strip().lower() == "-inf" else parse_number(bias)
        except ValueError as error:
            expected = str(error).partition(", got ")[0].removeprefix("must be ")
            expected = expected if not equals else f"ID=BIAS, a token id and a number: {expected}"
            raise typer.BadParameter(f"must be {expected}, got {given!r}", param_hint="--logit-bias") from None
    return biases
