"""CPU kernels in C++, compiled once for this machine on first use."""
