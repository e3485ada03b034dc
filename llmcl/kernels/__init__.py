"""OpenCL C sources, read as package data by `llmcl.runtime.program`."""
