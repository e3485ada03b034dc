"""Structured output: restricts the next token so that an answer matches a JSON schema, an expression or a grammar."""

from __future__ import annotations

from llmcl.grammar.compiler import CompiledGrammar, Grammars
from llmcl.grammar.grammar import Grammar, without_unknown_formats
from llmcl.grammar.matcher import Matcher, masks_of

__all__ = ["CompiledGrammar", "Grammar", "Grammars", "Matcher", "masks_of", "without_unknown_formats"]
