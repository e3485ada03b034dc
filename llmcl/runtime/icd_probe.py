"""Run as a program with a driver library's path: exits with 0 if an OpenCL context opens on the first device.

A half-installed driver fails in three ways: the library does not load, it lists a device but opens no context (built-in
functions are missing), or it crashes the process. A child process survives all three, so this file is run by path and
imports only the standard library.
"""

from __future__ import annotations

import ctypes
import sys

ALL_DEVICES = 0xFFFFFFFF


def probe(path: str) -> str | None:
    """Returns the problem with the OpenCL driver library at `path`, or None."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    handle, handles, uint = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint
    counted = ctypes.POINTER(uint)
    try:
        library.clGetPlatformIDs.argtypes = [uint, handles, counted]
        library.clGetDeviceIDs.argtypes = [handle, ctypes.c_uint64, uint, handles, counted]
        library.clCreateContext.argtypes = [handle, uint, handles, handle, handle, ctypes.POINTER(ctypes.c_int)]
        library.clCreateContext.restype = handle
    except AttributeError as error:
        return str(error)
    platform, device, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    code = library.clGetPlatformIDs(1, ctypes.byref(platform), None)
    if code != 0:
        return f"clGetPlatformIDs failed with {code}"
    code = library.clGetDeviceIDs(platform, ALL_DEVICES, 1, ctypes.byref(device), None)
    if code != 0:
        return f"clGetDeviceIDs failed with {code}"
    library.clCreateContext(None, 1, ctypes.byref(device), None, None, ctypes.byref(status))
    return None if status.value == 0 else f"clCreateContext failed with {status.value}: files of the driver are missing"


if __name__ == "__main__":
    problem = probe(sys.argv[1])
    if problem:
        sys.exit(problem)
