"""Kernels, a folder for each operation. Each kernel is a faster version of a function in `recurrence` or `attention`.

In a folder, `call.py` describes a call of the operation, `gpu.py` and `tpu.py` have its kernels, and `supports` says
which calls the kernel serves. `threads` and `instructions` are what the GPU kernels share. `dispatch` has the table of
kernels; `jaxbuf.target` says what a program is compiled for.
"""
