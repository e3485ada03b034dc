"""Folders of small random models with a vision tower and a tokenizer of characters."""

from __future__ import annotations

from pathlib import Path

from ascii_tokenizer import ascii_tokenizer
from fake_vision import TEMPLATE
from tokenizers import AddedToken
from vision_models import save_vision

MARKERS = {
    "gemma3": ("<start_of_image>", "<image_soft_token>"),
    "smolvlm": ("<image>", "<image>"),
    "qwen2_5_vl": ("<|image_pad|>", "<|image_pad|>"),
    "qwen3_vl": ("<|image_pad|>", "<|image_pad|>"),
    "mistral3": ("[IMG]", "[IMG]"),
}
OTHERS = "<end_of_image>", "<fake_token_around_image>", "<global-img>", "[IMG_BREAK]", "[IMG_END]"


def save_model(folder: Path, model_type: str) -> Path:
    """A random model with a tokenizer of characters; its image token has the configuration's id, 300."""
    marker, token = MARKERS[model_type]
    save_vision(folder, model_type)
    tokenizer = ascii_tokenizer()
    others = [name for name in (marker, *OTHERS) if name != token]
    fillers = [f"<unused{i}>" for i in range(300 - tokenizer.get_vocab_size() - len(others))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (*others, *fillers, token)])
    assert tokenizer.token_to_id(token) == 300
    tokenizer.save(str(folder / "tokenizer.json"))
    written = f"({marker})" if "qwen" in model_type else marker  # Qwen's template has tokens around it
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<start_of_image>", written))
    return folder
