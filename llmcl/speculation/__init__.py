"""Optional: speculative decoding, which the token loops use through `llmcl/engine/speculation.py` alone."""
