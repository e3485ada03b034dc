"""Images as inputs: pixels on the host, vision towers on the device. Optional: the core does not import it."""
