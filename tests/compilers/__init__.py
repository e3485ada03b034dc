"""The kernels that GPUs which are not here would run, compiled by their vendors' compilers.

`python tests/check_compilers.py` is the command. `recording` stands in for a device and notes what is launched on it,
`enumerate` has it load and run models, `toolchains` compiles what it noted, `table` compares the figures with
docs/results/compilers.json.
"""
