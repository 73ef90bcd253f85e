"""The GPU kernels beside fla, torch and cuBLAS, and beside what the memory allows: `python -m benchmarks.kernels`."""
