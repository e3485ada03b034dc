"""Qwen3-Reranker: the plain language model, one with a last matrix, and the GGUF file of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import byte_tokenizer
from gguf_reference import write_out
from late_kernels import compile_when_used

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import ContextLengthError, UnsupportedModelError
from llmcl.runtime.device import Device
from llmcl.serve.rerank import LlmReranker

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

QUERY, DOCUMENTS = "is a cat", ["cats sit", "the dog plays", "{query} {document}", "日本 " * 150]
ADDED = "<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"
TOKENIZER = byte_tokenizer(added=ADDED)
YES, NO = (TOKENIZER.encode(word, False)[0] for word in ("yes", "no"))
CONTEXT = 640
PROMPT = (  # as the model card has it
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: is a cat\n<Document>: "
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def random_model(kind: str, **changes: Any) -> Any:
    """transformers' model with random weights, large enough that documents differ."""
    import torch
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 96, "head_dim": 16, "vocab_size": TOKENIZER.n_vocab + 1, "pad_token_id": 0, **changes}
    torch.manual_seed(5)
    model = getattr(transformers, kind)(transformers.Qwen3Config(**sizes, **more))
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.copy_(torch.randn_like(values) * values.shape[-1] ** -0.5)
    return model.eval()


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    TOKENIZER._backend.save(str(folder / "tokenizer.json"))
    return folder


def prompts(most: int = CONTEXT) -> list[list[int]]:
    ids, end = [TOKENIZER.encode(PROMPT + text + END, False) for text in DOCUMENTS], TOKENIZER.encode(END, False)
    return [prompt if len(prompt) <= most else [*prompt[: most - len(end)], *end] for prompt in ids]


def scores(model: Any, *, labels: bool) -> np.ndarray:
    """By transformers: the sigmoid of the label's logit, or the share of yes beside no."""
    import torch

    found = []
    for ids in prompts():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits
        difference = logits[0, 0] if labels else logits[0, -1, YES] - logits[0, -1, NO]
        found.append(float(torch.sigmoid(difference)))
    return np.array(found)


@pytest.fixture(scope="module", params=["named", "readme", "one label"])
def reranker(
    request: pytest.FixtureRequest, default_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, np.ndarray]]:
    with_label = request.param == "one label"
    kind = "Qwen3ForSequenceClassification" if with_label else "Qwen3ForCausalLM"
    model = random_model(kind, **({"num_labels": 1} if with_label else {"tie_word_embeddings": True}))
    folder = tmp_path_factory.mktemp("Qwen3-Reranker-0.6B" if request.param == "named" else "model")
    if request.param == "readme":
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-Reranker-0.6B\n")
    with llmcl.load(str(saved(folder, model)), device=default_device, max_context=CONTEXT) as llm:
        yield llm, scores(model, labels=with_label)


def test_documents_are_scored_as_by_transformers(reranker: tuple[LLM, np.ndarray]) -> None:
    llm, expected = reranker
    got = llm.rerank(QUERY, DOCUMENTS)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.ptp(expected) > 0.01
    assert LlmReranker(llm, "name").rerank(QUERY, DOCUMENTS, truncate=True)[1] == sum(map(len, prompts()))
    with pytest.raises(ContextLengthError, match=r"documents\[3\] has \d+ tokens with the query, the model takes 640"):
        llm.rerank(QUERY, DOCUMENTS, truncate=False)
    with pytest.raises(ContextLengthError, match=r"documents\[0\] has"):
        llm.rerank("a" * 900, ["cat"])


def test_the_gguf_file_of_the_converter(default_device: Device, tmp_path: Path) -> None:
    """Rows for yes and no in cls.output, the prompt in the metadata, no output head."""
    model = random_model("Qwen3ForCausalLM", tie_word_embeddings=False)
    path = save_gguf(tmp_path / "model.gguf", model)
    with llmcl.load(str(path), device=default_device, max_context=CONTEXT) as llm:
        np.testing.assert_allclose(llm.rerank(QUERY, DOCUMENTS), scores(model, labels=False), atol=1e-4)


def test_a_classifier_is_refused(default_device: Device, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", random_model("Qwen3ForSequenceClassification", num_labels=3))
    with pytest.raises(UnsupportedModelError, match=r"has the shape \[3, 64\], a classifier's; llmcl runs rerankers"):
        llmcl.load(str(folder), device=default_device)


def save_gguf(path: Path, model: Any) -> Path:
    import gguf

    config, tokens = model.config, [*TOKENIZER._backend.get_vocab().items()]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    writer.add_chat_template(
        [{"name": "rerank", "template": PROMPT.replace("is a cat", "{query}") + "{document}" + END}]
    )
    names = [*(token for token, _ in sorted(tokens, key=lambda pair: pair[1])), "qz"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(names)
    writer.add_token_types([3 if i < 2 else 4 if name in ADDED else 1 for i, name in enumerate(names)])
    writer.add_token_merges(["q z"])  # the format has no empty lists; no text has it
    writer.add_eos_token_id(1)
    names_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        array = values.numpy().astype(np.float32)
        if name == "lm_head.weight":
            writer.add_tensor("cls.output.weight", np.stack([array[YES], array[NO]]))
            continue
        writer.add_tensor(names_of.get_name(name, (".weight",)), array)
    return write_out(writer, path)
