"""Options that several commands take, each declared once."""

from typing import Annotated, Literal

import typer

Model = Annotated[
    str, typer.Option(help="[bold]demo[/bold], the embedded model, or a checkpoint's directory or Hugging Face id.")
]
Dtype = Annotated[
    str | None, typer.Option(help="float32 or bfloat16; by default what suits the device and the checkpoint.")
]
MaxNewTokens = Annotated[int, typer.Option(help="How many tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time (greedy).")]
TopK = Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 does not restrict.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")]
Seed = Annotated[int, typer.Option(help="The same seed, shapes and device give the same tokens.")]
Limit = Annotated[int, typer.Option(help="How many entries the recurrent state's buffer holds before a fold.")]
Form = Annotated[
    Literal["auto", "recurrent", "buffered"],
    typer.Option(help="auto, recurrent (the state is written every step) or buffered (only when the buffer fills)."),
]
