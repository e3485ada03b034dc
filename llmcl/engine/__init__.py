"""From a request to tokens: LLM, conversations, generation, statistics."""
