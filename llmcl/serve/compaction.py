"""Compaction items of /v1/responses: a summary that stands for the earlier part of a conversation.

Open Responses calls the content of such an item opaque: clients send it back unread. Here it is the summary in Base64;
the client has seen the whole conversation anyway.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Sequence
from typing import Any

from llmcl.serve.fields import Fields, wrong
from llmcl.serve.image_parts import joined

_MARK = "llmcl1."
INSTRUCTION = (
    "The conversation so far is about to be replaced by a summary. Write it now, for yourself: what the user wants, "
    "what was done and found, decisions and their reasons, names and values that will be needed, and what comes next. "
    "Answer with the summary alone."
)
_INTRODUCTION = "Summary of the conversation so far:\n"


def compaction_item(summary: str) -> dict[str, Any]:
    content = _MARK + base64.b64encode(summary.encode("utf-8", "surrogatepass")).decode("ascii")
    return {"type": "compaction", "id": "cmp_" + secrets.token_hex(12), "encrypted_content": content}


def read_compaction(item: Fields) -> dict[str, Any]:
    """Returns the message that a compaction item stands for. Raises RequestError for an item from another server."""
    content = item.text("encrypted_content") or ""
    try:
        if not content.startswith(_MARK):
            raise ValueError
        summary = base64.b64decode(content[len(_MARK) :], validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        name = item.name("encrypted_content")
        raise wrong(name, content, "the content of an item that this server's /v1/responses/compact made") from None
    return {"role": "user", "content": _INTRODUCTION + summary}


def users_merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins neighbouring user messages, since many templates take roles in turns."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = merged[-1] | {"content": joined(merged[-1]["content"], message["content"])}
        else:
            merged.append(message)
    return merged
