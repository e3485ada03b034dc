"""What a message of llmcl must be: one or two printable sentences, with what to do about it, and not too long."""

from __future__ import annotations

import re

MAX_CHARACTERS = 600
MAX_SENTENCES = 3
# The mutations write long texts with this letter, so that a message shows how much it took over from a file.
FOREIGN = "\u0141"
MAX_FOREIGN = 200

# What a remedy is told with: what is expected or there is to choose from, or an imperative. As few as do.
_REMEDY = re.compile(
    r"\b(expected|allowed|must|supports|supported|there are|use|give|fetch|get|convert|check|write|put|lower|"
    r"raise|shorten|wait|install|free|try|merge|leave|choose|make|name|neither|send|set|run|load)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?] (?=[A-Z])")
_ASIDE = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)")  # quoted, or in brackets


def complaint(message: str, *, needs_remedy: bool = True) -> str | None:
    """What is wrong with a message, None where nothing is."""
    if not message.isprintable():
        odd = next(character for character in message if not character.isprintable())
        return f"the message holds the character U+{ord(odd):04X}"
    if (taken := message.count(FOREIGN) + message.lower().count(f"\\u{ord(FOREIGN):04x}")) > MAX_FOREIGN:
        return f"the message holds {taken} characters of a long text from a file"
    if len(message) > MAX_CHARACTERS:
        return f"the message has {len(message)} characters, expected at most {MAX_CHARACTERS}"
    if (sentences := 1 + len(_SENTENCE_END.findall(_ASIDE.sub("", message)))) > MAX_SENTENCES:
        return f"the message has {sentences} sentences, expected at most {MAX_SENTENCES}"
    if needs_remedy and not _REMEDY.search(message):
        return "the message does not say what to do"
    return None
