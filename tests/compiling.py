"""How programs of tests are compiled: those that tests start by themselves as `scripts/test` has it, and loops."""

QUICKLY = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# Of a program that runs for thousands of steps: XLA's newer code for fusions takes longer to compile and is, without
# LLVM's optimizations, several times as fast. The empty text takes back what `scripts/test` asks for.
MANY_STEPS = {"xla_backend_extra_options": ""}


def flags_for(devices: int) -> str:
    """XLA_FLAGS for so many simulated devices."""
    return f"--xla_force_host_platform_device_count={devices} {QUICKLY}"
