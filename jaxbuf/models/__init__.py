"""Architectures: Flax NNX modules as containers of parameters, pure forward functions, Hugging Face checkpoints."""
