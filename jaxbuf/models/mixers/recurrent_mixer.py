"""What all recurrent mixers have in common: their sizes, and their memory."""

import dataclasses
from typing import Self

from jaxbuf.models.config import RECURRENCE
from jaxbuf.models.tensor_parallel import share
from jaxbuf.recurrence.recurrent_memory import RecurrentCache, RecurrentShared, init_recurrent
from jaxbuf.recurrence.spec import RecurrenceSpec


@dataclasses.dataclass(frozen=True)
class RecurrentMixer:
    """A mixer with a recurrence, and a short convolution over q, k and v in front of it.

    Attributes:
      spec: The recurrence.
      width: Taps of the convolution.
      eps: Of the norm behind the recurrence.
      devices: Who share the heads; those of `spec` are then one device's.
      same_key_head: How many neighbours among these have the same key heads.
    """

    spec: RecurrenceSpec
    width: int
    eps: float
    devices: int = dataclasses.field(default=1, kw_only=True)
    same_key_head: int = dataclasses.field(default=1, kw_only=True)

    @property
    def kind(self) -> str:
        return RECURRENCE

    @property
    def kv_numbers(self) -> int:
        return 0

    @property
    def channels(self) -> int:
        return self.spec.channels

    def spread(self, devices: int) -> Self:
        """What each of so many devices has of it; errors as in `Mixer.spread`."""
        spec = self.spec
        heads = share("value heads of the linear layers", spec.heads, devices)
        key_heads = share("key heads of the linear layers", spec.key_heads, devices, repeated=True)
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(spec, heads=heads, key_heads=key_heads),
            devices=devices,
            same_key_head=max(1, devices // spec.key_heads),
        )

    def memory(self, shared: RecurrentShared, dtypes, number: int) -> RecurrentCache:
        given = {name: getattr(dtypes, name) for name in ("dtype", "entry_dtype", "state_dtype")}
        return init_recurrent(self.spec, shared.cursor, channels=self.channels, width=self.width, **given)
