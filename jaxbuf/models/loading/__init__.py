"""Checkpoints in the format of Hugging Face: found, read onto devices, and written."""
