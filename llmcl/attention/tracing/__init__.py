"""From a Python function to OpenCL C: symbols that record, the graph they leave, and what is asked of it."""
