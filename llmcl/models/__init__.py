"""From a checkpoint to a stack on the device: configuration, layers, weights, KV cache, forecast of memory."""
