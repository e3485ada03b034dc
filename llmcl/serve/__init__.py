"""HTTP: what OpenAI's and Anthropic's clients expect, in front of an engine."""
