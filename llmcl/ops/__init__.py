"""One file per op. An op checks shapes, picks a kernel variant for the device and returns bound launches."""
