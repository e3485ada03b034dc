"""What scripts/bench_attention.py consists of: llmcl's kernels, what they are measured against, and the measuring."""
