"""Shared code for kernels on every device class: storage types, weights, step state."""
