"""What the kernels of every device class share: storage types, weights, the state of a step."""
