"""Where parameters lie in a checkpoint: one tensor each, rows of one that several share, or many tensors stacked."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a tensor along its first axis: blocks at equal distances.

    Attributes:
      name: Of the tensor.
      size: Rows of a block.
      start: Where the first block begins.
      count: Blocks.
      step: From the beginning of a block to that of the next.
    """

    name: str
    size: int
    start: int = 0
    count: int = 1
    step: int = 0


class Piece(NamedTuple):
    """`size` neighbouring rows, at `there` in the tensor `name` and at `here` in a parameter."""

    name: str
    there: int
    here: int
    size: int


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter lies in a checkpoint.

    Attributes:
      stored: The name of a tensor that is the parameter, or the rows of tensors that are the parameter's rows, in
        order. A tensor may give its rows to several parameters, each of them to one.
      depthwise: Whether it is a depthwise convolution's, stored as [channels, 1, width].
      stacked: Whether the parameter's rows are those of its first two axes, [experts, out], which tensors have as one.
    """

    stored: str | tuple[Rows, ...]
    depthwise: bool = False
    stacked: bool = False

    @property
    def first(self) -> str:
        """The name of the first tensor."""
        return self.stored if isinstance(self.stored, str) else self.stored[0].name

    def behind(self, name: str) -> "Source":
        """The same with something in front of the tensors' names."""
        if isinstance(self.stored, str):
            return dataclasses.replace(self, stored=name + self.stored)
        rows = tuple(dataclasses.replace(each, name=name + each.name) for each in self.stored)
        return dataclasses.replace(self, stored=rows)

    def flat(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A parameter's shape, or a part's, with its rows along one axis."""
        return (shape[0] * shape[1], *shape[2:]) if self.stacked else tuple(shape)

    def pieces(self, shape: Sequence[int]) -> Iterator[Piece]:
        """The tensors' rows, in the order of a parameter of this shape."""
        if isinstance(self.stored, str):
            yield Piece(self.stored, 0, 0, self.flat(shape)[0])
            return
        here = 0
        for rows in self.stored:
            for block in range(rows.count):
                yield Piece(rows.name, rows.start + block * rows.step, here, rows.size)
                here += rows.size


def stored_shapes(sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, in the order in which parameters name them.

    Args:
      sources, shapes: Of each parameter, by its path.

    Raises:
      ValueError: A source has more or fewer rows than its parameter, or parameters do not share a tensor's rows.
    """
    ends, given, rest = {}, {}, {}
    for path, shape in shapes.items():
        source, rows = sources[path], 0
        inner = source.flat(shape)[1:]
        for piece in source.pieces(shape):
            ends[piece.name] = max(ends.get(piece.name, 0), piece.there + piece.size)
            given[piece.name] = given.get(piece.name, 0) + piece.size
            rest[piece.name] = (1, *inner) if source.depthwise else inner
            rows += piece.size
        if rows != source.flat(shape)[0]:
            raise ValueError(f"the source of {path} has {rows} rows, expected {source.flat(shape)[0]}")
    for name, end in ends.items():
        if given[name] != end:
            raise ValueError(f"each of the {end} rows of {name} must be one parameter's, got {given[name]}")
    return {name: (end, *rest[name]) for name, end in ends.items()}
