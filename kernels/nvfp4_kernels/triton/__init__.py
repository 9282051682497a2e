"""Triton kernels for CUDA GPUs (sm_80 and newer): the bits of `reference.py` at the speed of memory."""
