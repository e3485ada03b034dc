"""OpenCL itself: platforms, devices, programs, buffers. Nothing here knows what a token is."""
