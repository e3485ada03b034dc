"""OpenCL itself: platforms, devices, programs, buffers. Nothing here knows about tokens."""
