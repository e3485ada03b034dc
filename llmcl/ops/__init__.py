"""One file an op: it checks shapes, picks a kernel variant for the device and returns bound launches."""
