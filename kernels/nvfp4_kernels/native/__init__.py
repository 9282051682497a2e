"""NVFP4 on Blackwell's FP4 tensor cores: codes and swizzled scales in, the same numbers out as the emulated GEMM."""
