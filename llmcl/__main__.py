"""`python -m llmcl`: the same as the program `llmcl`."""

from llmcl.cli import main

main()
