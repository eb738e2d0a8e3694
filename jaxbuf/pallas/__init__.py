"""Kernels, a folder per operation. Each is a faster version of a function in `recurrence` or `attention`."""
