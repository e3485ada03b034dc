"""Serves an engine over HTTP, to clients written for OpenAI's and Anthropic's APIs."""
