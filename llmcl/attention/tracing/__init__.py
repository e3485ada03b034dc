"""Traces a Python function to OpenCL C: symbols record a graph, and passes over the graph analyse it and emit code."""
