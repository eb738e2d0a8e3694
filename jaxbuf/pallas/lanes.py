"""What the Mosaic GPU kernels share: each says for every array which thread holds what of it."""

from jax.experimental.pallas import mosaic_gpu as plgpu

# Layouts are given and barriers written out: inferring them takes minutes for the larger kernels.
COMPILER = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def load(ref, layout):
    """The array of a reference in global or shared memory, spread over the threads as `layout` says."""
    return plgpu.load(ref, layout=layout, optimized=False)
