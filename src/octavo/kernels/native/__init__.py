"""The native backend: C++ kernels, replayed as one call per step."""
