"""What a softmax mixer does with its memory: on whole sequences without one, or in a launch on a cache.

Both plans have the same functions, so that a mixer is written once: `angles`, and `attend` or `attend_latent`; and
`shared_by`, which is called before the first layer.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxbuf.attention.causal import causal_attention
from jaxbuf.attention.latent import LatentPages, append_and_attend_latent, causal_latent_attention
from jaxbuf.attention.paged import PagedKV
from jaxbuf.attention.paged_launch import append_and_attend
from jaxbuf.attention.paged_selection import append_and_attend_selected
from jaxbuf.attention.rotary import Rotary
from jaxbuf.attention.selection import Selection
from jaxbuf.axes import Array, Float, Int32
from jaxbuf.memory.sequences import Launch
from jaxbuf.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Angles:
    """Angles that layers share.

    Attributes:
      rotaries: What they are of (static).
      values: For each of these, `Rotary.angles` of the positions.
    """

    rotaries: tuple[Rotary, ...] = dataclasses.field(default=(), metadata={"static": True})
    values: tuple[tuple[Array, Array], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Positions of tokens, and the angles that layers share."""

    shared: Angles = dataclasses.field(default=Angles(), kw_only=True)

    @property
    def positions(self) -> Array:
        """int32 [rows or 1, time]."""
        raise NotImplementedError

    def shared_by(self, mixers: Iterable[Any]) -> Self:
        """The same plan with what layers with these mixers share, which is computed here, once for all of them."""
        rotaries = tuple(dict.fromkeys(mixer.rotary for mixer in mixers if mixer.rotary is not None))
        values = tuple(rotary.angles(self.positions) for rotary in rotaries)
        return dataclasses.replace(self, shared=Angles(rotaries, values))

    def angles(self, rotary: Rotary) -> tuple[Array, Array]:
        """`Rotary.angles` of the positions."""
        if rotary in self.shared.rotaries:
            return self.shared.values[self.shared.rotaries.index(rotary)]
        return rotary.angles(self.positions)


@dataclasses.dataclass(frozen=True)
class WholePositions(_Positions):
    """The positions of sequences that start from nothing, without a memory.

    Attributes:
      time: The tokens of a row (static).
      lengths: How many of them are real; None: all.
      target: What the program is compiled for (static); None: what is resolved for each operation.
    """

    time: int
    lengths: Int32[Array, "rows"] | None = None
    target: Target | None = None

    @property
    def positions(self) -> Int32[Array, "#rows time"]:
        return jnp.arange(self.time, dtype=jnp.int32)[None]


@partial(jax.tree_util.register_dataclass, data_fields=["lengths", "shared"], meta_fields=["time", "target"])
@dataclasses.dataclass(frozen=True)
class WholeAttention(WholePositions):
    """Sequences that start from nothing, without a memory: it is None. Differentiable."""

    def attend(
        self,
        memory: None,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
    ) -> tuple[Float[Array, "rows time heads head_dim"], None]:
        """`causal_attention`."""
        return causal_attention(q, k, v, lengths=self.lengths, target=self.target), None

    def attend_selected(
        self,
        memory: None,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
        selection: Selection,
        rotary: Rotary | None,
    ) -> tuple[Float[Array, "rows time heads head_dim"], None]:
        """`Selection.attend_sequence`."""
        return selection.attend_sequence(q, k, v, rotary, lengths=self.lengths), None

    def attend_latent(
        self,
        memory: None,
        q: Float[Array, "rows time heads head_dim"],
        latents: Float[Array, "rows time latent"],
        up: Float[Array, "heads n rank"],
        scale: float | None = None,
    ) -> tuple[Float[Array, "rows time heads value_dim"], None]:
        """`causal_latent_attention`."""
        where: dict[str, Any] = {"lengths": self.lengths, "target": self.target}
        return causal_latent_attention(q, latents, up, scale=scale, **where), None


@dataclasses.dataclass(frozen=True)
class LaunchPositions(_Positions):
    """The positions of a launch on a cache.

    Attributes:
      launch: The launch.
    """

    launch: Launch

    @property
    def target(self) -> Target | None:
        return self.launch.target

    @property
    def positions(self) -> Int32[Array, "#rows time"]:
        return self.launch.start[:, None] + self.launch.depth


@partial(jax.tree_util.register_dataclass, data_fields=["launch", "table", "order", "shared"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LaunchedAttention(LaunchPositions):
    """A launch on a cache: a layer's memory is a PagedKV, or LatentPages.

    Attributes:
      launch: The launch.
      table, order: The pages of each slot, and where its next tokens lie in them, see `jaxbuf.attention.paged`.
    """

    table: Int32[Array, "slots max_pages"]
    order: Int32[Array, "slots max_pending"] | None = None

    def attend(
        self,
        memory: PagedKV,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
    ) -> tuple[Float[Array, "rows time heads head_dim"], PagedKV]:
        """`append_and_attend`."""
        return append_and_attend(q, k, v, memory, self.table, **self._where())

    def attend_selected(
        self,
        memory: PagedKV,
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"],
        v: Float[Array, "rows time kv_heads head_dim"],
        selection: Any,
        rotary: Rotary | None,
    ) -> tuple[Float[Array, "rows time heads head_dim"], PagedKV]:
        """`append_and_attend_selected`; prompts, whose tokens a launch commits at once, read everything."""
        if self.launch.commits:
            return self.attend(memory, q, k, v)
        return append_and_attend_selected(q, k, v, memory, self.table, selection, **self._where())

    def attend_latent(
        self,
        memory: LatentPages,
        q: Float[Array, "rows time heads head_dim"],
        latents: Float[Array, "rows time latent"],
        up: Float[Array, "heads n rank"],
        scale: float | None = None,
    ) -> tuple[Float[Array, "rows time heads value_dim"], LatentPages]:
        """`append_and_attend_latent`."""
        return append_and_attend_latent(q, latents, memory, up, self.table, scale=scale, **self._where())

    def _where(self) -> dict[str, Any]:
        launch = self.launch
        where: dict[str, Any] = {"slots": launch.slots, "start": launch.start, "lengths": launch.lengths}
        return where | {"order": self.order, "ancestors": launch.ancestors, "target": launch.target}
