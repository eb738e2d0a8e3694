"""How much vector memory (VMEM) a TensorCore of each TPU generation has, which decides the kernels' block sizes."""

MEBIBYTE = 2**20
VMEM = {"v4": 16, "v5e": 128, "v5p": 128, "v6e": 128, "tpu7x": 64}  # MiB of a TensorCore


def vmem_bytes(generation: str) -> int:
    """Bytes of VMEM that a kernel for a generation may plan with.

    Args:
      generation: As in `jaxbuf.target.Target`. Of another one (a kernel that is interpreted for a CPU), v5e's.
    """
    return VMEM.get(generation, VMEM["v5e"]) * MEBIBYTE


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes that an array takes in VMEM, where the last two axes are padded to tiles of 8 by 128 words of 32 bits.

    Args:
      shape: Of the array.
      itemsize: Bytes of a number.
    """
    *outer, rows, columns = (1, *shape) if len(shape) == 1 else shape
    sublanes = 8 * max(1, 4 // itemsize)
    count = -(-rows // sublanes) * sublanes * (-(-columns // 128) * 128)
    for size in outer:
        count *= size
    return count * itemsize
