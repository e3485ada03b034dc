"""Rerankers that are decoders: whether a checkpoint is one, and the prompts that it judges.

Sources: the model card of Qwen3-Reranker; llama.cpp's conversion/qwen.py for GGUF files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmcl.architectures.embedding import JudgingHead
from llmcl.architectures.families import FAMILIES
from llmcl.checkpoint import Checkpoint
from llmcl.checkpoint.files import read_view
from llmcl.checkpoint.formats import dequantize
from llmcl.errors import ContextLengthError, UnsupportedModelError, counted
from llmcl.tokenizer import Tokenizer

_NAMES = ("qwen3-reranker",)
_TEMPLATE_KEY = "tokenizer.chat_template.rerank"
_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def judging_head(checkpoint: Checkpoint, tokenizer: Tokenizer) -> JudgingHead | None:
    """Returns the head of a Qwen3-Reranker, or None for another model.

    Three forms: a last matrix in the checkpoint with one label, or two (yes, no); the plain language model, which its
    name or README.md tells. Raises UnsupportedModelError for more labels.
    """
    if not FAMILIES[checkpoint.config.architecture].judges:
        return None
    metadata = checkpoint.gguf_metadata or {}
    template = metadata.get(_TEMPLATE_KEY)
    template = template if isinstance(template, str) else _TEMPLATE
    if (tensor := checkpoint.judging) is not None:
        shape = tensor.shape if len(tensor.shape) == 2 else (1, *tensor.shape)
        if len(shape) != 2 or shape[0] > 2 or shape[1] != checkpoint.config.hidden_size:
            raise UnsupportedModelError(
                f"the model's last matrix has the shape {list(shape)}, a classifier's; llmcl runs rerankers with one "
                f"label, or with yes and no, of {checkpoint.config.hidden_size} values"
            )
        rows = dequantize(tensor.format, read_view(tensor.data).reshape(shape[0], -1))
        return JudgingHead(rows[0] - rows[1] if len(rows) == 2 else rows[0], template)
    if not _is_named(checkpoint):
        return None
    name = "model.embed_tokens.weight" if checkpoint.config.tie_embeddings else "lm_head.weight"
    format = checkpoint.tensors[name].format
    ids = [tokenizer.encode(word, False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in ids):
        return None
    yes, no = (dequantize(format, checkpoint.rows(name, i, i + 1))[0] for (i,) in ids)
    return JudgingHead((yes - no).astype(np.float32), template)


def _is_named(checkpoint: Checkpoint) -> bool:
    path = checkpoint.path
    names = [checkpoint.name, path.name, str((checkpoint.gguf_metadata or {}).get("general.name", ""))]
    if any(name in text.lower().replace(" ", "-") for text in names for name in _NAMES):
        return True
    return path.is_dir() and any(f"# {name}" in _beginning(path / "README.md") for name in _NAMES)


def _beginning(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            return text.read(1 << 14).lower()
    except OSError:
        return ""


def prompts_to_judge(
    tokenizer: Tokenizer, head: JudgingHead, query: str, documents: list[str], most: int, *, truncate: bool
) -> list[list[int]]:
    """Returns the token ids of a prompt for each document, which truncate cuts to `most` at the document's end.

    Raises ContextLengthError, with the document's index.
    """
    before, _, after = head.template.partition("{document}")
    before, after = before.replace("{query}", query), after.replace("{query}", query)
    end = tokenizer.encode(after, False)
    prompts = []
    for i, document in enumerate(documents):
        ids = tokenizer.encode(before + document + after, False)
        if len(ids) > most:
            n_before = len(tokenizer.encode(before, False))
            if not truncate or n_before + len(end) >= most:
                raise ContextLengthError(
                    f"documents[{i}] has {counted(len(ids), 'token')} with the query, the model takes {most}; shorten "
                    "one of them, or cut the document with truncate"
                )
            ids = [*ids[: most - len(end)], *end]
        prompts.append(ids)
    return prompts
