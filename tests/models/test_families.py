"""Each supported architecture against transformers on random weights, from a Hugging Face folder and from GGUF.

Errors are the largest difference over the largest reference logit, in float32. The texts are longer than the windows,
so that a window that is missing, or off by one, shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from expert_weights import stacked_experts
from family_configs import FAMILIES, FURTHER, IN_GGUF, MOST, N_TOKENS, ids_for
from family_files import WINDOW, save_gguf
from helpers import (
    random_weights,
    relative_error,
    save_folder,
    small_config,
    transformers_class,
    transformers_logits,
    transformers_model,
    with_blocks,
)
from late_kernels import compile_when_used
from parameters import slow_except
from tiers import is_full

import llmcl
from llmcl import reference
from llmcl.architectures.config import ModelConfig
from llmcl.convert import convert
from llmcl.engine.llm import LLM
from llmcl.errors import UnsupportedModelError, UsageError
from llmcl.kernels.common.mods import NO_MODS
from llmcl.models.layer_mods import trace_layer_mods
from llmcl.runtime.device import Device
from llmcl.tokenizer.chat_template import render

if not is_full():  # the persistent kernels take seconds to compile
    pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
slow = pytest.mark.slow
ALL = FAMILIES | FURTHER


def decode(llm: LLM, ids: Sequence[int], from_position: int, chunk: int | None = None) -> np.ndarray:
    """Logits of every position from from_position - 1 on: what is before it is prefilled."""
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.prefill(llm.sequence, ids[:from_position], chunk=chunk)
    rows = [last_logits(llm)]
    for token in ids[from_position:]:
        llm.model.decode_token(llm.sequence, token)
        rows.append(last_logits(llm))
    return np.stack(rows)


def is_one_length(config: ModelConfig) -> bool:
    """Whether a beginning of a text has the whole text's rotary frequencies; else see test_rope_by_length.py."""
    return config.rope_by_length is None


def last_logits(llm: LLM) -> np.ndarray:
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


def answers_as(model: Any, llm: LLM, prompt: list[int]) -> None:
    """Asserts that after the prompt the model of transformers chooses the same 40 tokens."""
    answer = llm.generate(prompt, max_tokens=40, ignore_eos=True).token_ids
    choices = transformers_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(axis=-1)
    assert answer == choices.tolist()


FIRST = {config.architecture: name for name, config in reversed(FAMILIES.items())}
OTHERS = [*(name for name in FAMILIES if name not in FIRST.values()), *FURTHER]


def sizes(config: ModelConfig) -> tuple[int, ...]:
    return config.hidden_size, config.n_q_heads, config.n_kv_heads, config.head_dim


KIND = {
    name: "gpu" if sizes(FAMILIES[name]) == sizes(FAMILIES[FIRST[FAMILIES[name].architecture]]) else "as it is"
    for name in OTHERS
    if name in FAMILIES
}
KIND |= {"glm4_moe_lite-odd": "gpu", "gemma4_text-given": "as it is"} | dict.fromkeys(FURTHER, "as it is")
"""Of the kernels of each shape but the first of an architecture: one kind, as they take seconds to compile. A GPU's
where it has other parts in the first's sizes: most programs are the first's. Where its sizes are others, which
tests/kernels has, the device's own, which take a third of the time; but in one shape, whose rows are no whole tiles.
Gemma 4's layers with inputs have the device's own, too: a GPU's took 15 s.
"""
IN_ONE_LAUNCH = (
    *("llama-biases", "olmo2", "qwen3", "gemma2", "cohere2", "apertus", "minimax_m2", "gpt_oss"),
    *("qwen3_moe", "granitemoeshared", "lfm2_moe", "nemotron_h", "qwen3_5_text-odd", "deepseek_v3-odd"),
    *("gemma4_text-apart", "gemma4_text-late"),
)
"""Those that a CPU has a persistent kernel of, which takes 3 s to compile: every kind of layer is among them. The other
families have the same kinds in other combinations; tests/kernels/test_persistent_step.py shows the same bits.
"""


def cases(names: Iterable[str], *, both: bool) -> list[Any]:
    """A name with its kinds of kernels; of the first shape of an architecture, if `both`, a CPU's and a GPU's.

    All but MOST are slow.
    """
    found = []
    for name in names:
        kinds = (KIND[name],) if name in KIND else ("cpu", "gpu") if both else ("as it is",)
        for kind in kinds:
            marks = [slow] * (kind == "gpu" or name != MOST)
            found.append(pytest.param(name, kind, marks=marks, id=f"{name}-{kind}"))
    return found


@pytest.fixture(scope="module")
def device_as(default_device: Device) -> Iterator[Callable[[str], Device]]:
    """device_as(kind): opened once for all models, as a driver takes milliseconds to load each compiled program."""
    own = default_device.entry
    others: dict[str, Device] = {}

    def device_as(kind: str) -> Device:
        if kind in ("as it is", own.kind):
            return default_device
        if kind not in others:
            others[kind] = Device.open(dataclasses.replace(own, kind=kind))
        return others[kind]

    yield device_as
    for device in others.values():
        device.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest, device_as: Callable[[str], Device]) -> Device:
    """The device with its own kernels, those of a CPU, or as a GPU the portable ones on the same device.

    A CPU has persistent kernels of IN_ONE_LAUNCH alone.
    """
    name = request.node.callspec.params["name"]
    if name not in IN_ONE_LAUNCH:
        request.getfixturevalue("separate_launches")
    return device_as(request.param)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """folder_of(name): the folder of a family's model, and the model of transformers; for both kinds of kernels."""

    @cache
    def folder_of(name: str) -> tuple[Path, Any]:
        config = ALL[name]
        weights = random_weights(config, seed=1)
        return save_folder(tmp_path_factory.mktemp(name), config, weights), transformers_model(config, weights)

    return folder_of


@pytest.mark.parametrize(("name", "kind"), cases(ALL, both=True), indirect=["kind"])
def test_a_folder_of_the_family_computes_what_transformers_does(
    name: str, kind: Device, folder_of: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = folder_of(name)
    ids = ids_for(ALL[name])
    expected = transformers_logits(model, ids)
    with llmcl.load(str(folder), device=kind, dtype="float32", max_context=128) as llm:
        assert llm.config == ALL[name]
        assert relative_error(llm.logits(ids), expected) < BOUND
        start = 60 if is_one_length(llm.config) else 70
        assert relative_error(decode(llm, ids, start), expected[start - 1 :]) < BOUND
        assert relative_error(decode(llm, ids, 80, chunk=7), expected[79:]) < BOUND
        answers_as(model, llm, ids[: 33 if is_one_length(llm.config) else start])


@pytest.mark.parametrize(("name", "kind"), cases((*IN_GGUF, MOST), both=False), indirect=["kind"])
def test_a_gguf_file_of_the_family_computes_what_transformers_does(name: str, kind: Device, tmp_path: Path) -> None:
    config = ALL[name]
    if config.architecture in ("gemma2", "gemma3_text"):  # the format has no key for another scale
        config = dataclasses.replace(config, attention_scale=config.head_dim**-0.5)
    weights = random_weights(config, seed=3)
    ids = ids_for(config)
    model = transformers_model(config, weights)
    expected = transformers_logits(model, ids)
    path = save_gguf(tmp_path / "model.gguf", config, weights)
    with llmcl.load(str(path), device=kind, dtype="float32", max_context=128) as llm:
        assert relative_error(llm.logits(ids), expected) < BOUND
        assert relative_error(decode(llm, ids, 80), expected[79:]) < BOUND
        answers_as(model, llm, ids[: 33 if is_one_length(llm.config) else 80])


@slow
@pytest.mark.parametrize(
    ("name", "plain"),
    [("qwen3_vl_text", "qwen3"), ("qwen3_vl_moe_text", "qwen3_moe"), ("qwen2_5_vl_text", "qwen2")],
)
def test_a_gguf_file_of_the_text_part_of_qwens_vision_models(
    name: str, plain: str, default_device: Device, tmp_path: Path
) -> None:
    """Beside the plain model, which is the same on text."""
    config = FAMILIES[plain]
    weights = random_weights(config, seed=3)
    path = save_gguf(tmp_path / "model.gguf", dataclasses.replace(config, architecture=name), weights)
    with llmcl.load(str(path), device=default_device, dtype="float32", max_context=128) as llm:
        assert llm.config.architecture == name
        expected = transformers_logits(transformers_model(config, weights), ids_for(config))
        assert relative_error(llm.logits(ids_for(config)), expected) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "ministral3"])
def test_the_text_part_of_a_model_with_images(name: str, default_device: Device, tmp_path: Path) -> None:
    """As transformers writes such a model, and under the names of a later version."""
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    config = dataclasses.replace(FAMILIES[name], logit_soft_cap=None)  # transformers leaves it out here
    text = transformers_class(config).config
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"image_size": 28, "patch_size": 14}
    kind = "Gemma3" if name == "gemma3_text" else "Mistral3"
    vision = {**tower, "model_type": "siglip_vision_model" if kind == "Gemma3" else "pixtral"}
    tied = {"tie_word_embeddings": config.tie_embeddings}
    whole = getattr(transformers, f"{kind}Config")(text_config=text.to_dict(), vision_config=vision, **tied)
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(whole).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(0.0, 0.1)
    ids = ids_for(config)
    expected = transformers_logits(model, ids)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    options: dict[str, Any] = {"device": default_device, "dtype": "float32", "max_context": 128}
    with llmcl.load(str(folder), **options) as llm:
        assert llm.config.architecture == name
        assert relative_error(llm.logits(ids), expected) < BOUND
    tensors = load_file(folder / "model.safetensors")
    assert any(tensor.startswith("language_model.model.") for tensor in tensors)
    renamed = {tensor.replace("language_model.model.", "model.language_model."): x for tensor, x in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    with llmcl.load(str(folder), **options) as llm:
        assert relative_error(llm.logits(ids), expected) < BOUND


@slow
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_part_of_qwen35_alone_is_read(kind: str, default_device: Device, tmp_path: Path) -> None:
    """As Qwen publishes it: text under a prefix, beside it a tower for images and layers that draft tokens. The
    experts of a layer are stacked.
    """
    import json

    from safetensors.numpy import load_file, save_file

    model_type = "qwen3_5" if kind == "Qwen3_5" else "qwen3_5_moe"
    config = FAMILIES[f"{model_type}_text-odd"]
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=128) as llm:
        expected = llm.logits(ids_for(config))
    tensors = stacked_experts(config, load_file(folder / "model.safetensors"))
    whole = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    whole |= {"model.visual.blocks.0.attn.qkv.weight": np.zeros((8, 8)), "mtp.fc.weight": np.zeros((8, 8))}
    save_file(whole, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    named = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": model_type}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    (folder / "config.json").write_text(json.dumps({**named, **tied, "text_config": text, "vision_config": {}}))
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=128) as llm:
        assert llm.config.architecture == f"{model_type}_text"
        np.testing.assert_array_equal(llm.logits(ids_for(config)), expected)


def test_a_folder_is_not_made_of_a_model_whose_tensors_llmcl_renames(tmp_path: Path) -> None:
    config = FAMILIES["lfm2"]
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    with pytest.raises(UnsupportedModelError, match="lfm2"):
        convert(str(folder), tmp_path / "new", dtype="bfloat16")


@slow
def test_pages_hold_what_a_contiguous_cache_does(default_device: Device, tmp_path: Path) -> None:
    config = FAMILIES["gemma2"]
    folder = str(save_folder(tmp_path / "model", config, random_weights(config, seed=1)))
    logits = []
    for page_tokens in (None, 64):
        with llmcl.load(
            folder, device=default_device, dtype="float32", max_context=128, kv_page_tokens=page_tokens
        ) as llm:
            logits.append(decode(llm, ids_for(config), 60))
    assert relative_error(logits[1], logits[0]) < 2e-5


@pytest.mark.parametrize("name", slow_except(ALL, MOST, "gpt_oss", "nemotron_h", "qwen3_5_text", "deepseek_v3"))
def test_the_twin_computes_what_transformers_does(name: str) -> None:
    config = ALL[name]
    weights = random_weights(config, seed=2)
    expected = transformers_logits(transformers_model(config, weights, "float64"), ids_for(config))
    assert relative_error(reference.forward(config, weights, ids_for(config)), expected) < 1e-5


def has_window(block: Any) -> bool:
    return getattr(block, "window", None) is not None


@pytest.mark.parametrize("name", [pytest.param(name, marks=[slow] * (name != MOST)) for name in FAMILIES])
def test_every_part_of_a_family_shows(name: str) -> None:
    """A text on which leaving a part out changes nothing would not show that llmcl has it."""
    config = FAMILIES[name]
    weights = random_weights(config, seed=1)
    without_bias = {key: 0.0 * value if key.endswith(".bias") else value for key, value in weights.items()}
    logits = reference.forward(config, weights, ids_for(config))
    plain = small_config()
    fields = ["embedding_scale", "residual_scale", "attention_scale", "logit_scale", "logit_soft_cap", "rope_scaling"]
    if config.rope_scaling is None:  # which may have a factor for each rotated dimension
        fields.append("rotary_dim")
    for field in fields:
        if getattr(config, field) != getattr(plain, field):
            changed = dataclasses.replace(config, **{field: getattr(plain, field)})
            assert relative_error(reference.forward(changed, weights, ids_for(config)), logits) > 100 * BOUND, field
    usual: dict[str, Any] = {"activation": "silu", "soft_cap": None, "window": None, "head_norms": False}
    usual |= {"rotation": "main", "row_norms": False, "query_scale": None, "sinks": False, "shared_gate": None}
    usual |= {"value_norms": False, "norms_after_rotation": False}
    if len(config.kinds_of_heads) > 1:  # whose layers cannot rotate alike
        del usual["rotation"]
        changed = dataclasses.replace(config, local_rope_theta=config.rope_theta)
        assert relative_error(reference.forward(changed, weights, ids_for(config)), logits) > 100 * BOUND
    for field, value in usual.items():
        changed = with_blocks(config, lambda block: {field: value} if hasattr(block, field) else {})  # noqa: B023
        if changed != config:
            assert relative_error(reference.forward(changed, weights, ids_for(config)), logits) > 100 * BOUND, field
    if any(name.endswith(".bias") for name in weights):
        assert relative_error(reference.forward(config, without_bias, ids_for(config)), logits) > 100 * BOUND
    for factors in ("layer_scalar", "router.scale", "router.per_expert_scale"):
        ones = {name: np.ones_like(values) for name, values in weights.items() if name.endswith(factors)}
        if ones:
            assert relative_error(reference.forward(config, weights | ones, ids_for(config)), logits) > 100 * BOUND
    if config.has_windows:
        changed = with_blocks(config, lambda block: {"window": block.window + 1} if has_window(block) else {})
        assert relative_error(reference.forward(changed, weights, ids_for(config)), logits) > 10 * BOUND


# ---- the user's rules on top of the model's ----------------------------------------------------------------------

slopes = np.array([0.5, 0.1, 0.02, 0.0], np.float32)


def farther_counts_less(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 3.0 + slopes[h] * (kv_idx - q_idx)


def no_multiple_of_five(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 5 != 0) | (kv_idx == q_idx)


def test_a_users_functions_come_after_those_of_the_model(default_device: Device, tmp_path: Path) -> None:
    """Against transformers with the same rules: what its attention makes of scores, and its masks, are changed."""
    import torch

    config = FAMILIES["gemma2"]
    weights = random_weights(config, seed=4)
    ids = ids_for(config)
    model = transformers_model(config, weights)
    distance = torch.arange(N_TOKENS)[:, None] - torch.arange(N_TOKENS)[None, :]
    unseen = torch.tensor([[k % 5 == 0 and k != q for k in range(N_TOKENS)] for q in range(N_TOKENS)])

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        block = config.attention(module.layer_idx)
        scores = block.soft_cap * torch.tanh(scores / block.soft_cap)
        scores = scores * 3.0 - torch.from_numpy(slopes)[None, :, None, None] * distance
        window = block.window or N_TOKENS
        scores = scores.masked_fill(unseen | (distance < 0) | (distance >= window), -torch.inf)
        return (scores.softmax(dim=-1) @ value).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("llmcl_test", attention)
    model.set_attn_implementation("llmcl_test")
    expected = transformers_logits(model, ids)
    folder = str(save_folder(tmp_path / "model", config, weights))
    options: dict[str, Any] = {"score_mod": farther_counts_less, "mask_mod": no_multiple_of_five}
    with llmcl.load(folder, device=default_device, dtype="float32", max_context=128, **options) as llm:
        assert relative_error(llm.logits(ids), expected) < BOUND
        assert relative_error(decode(llm, ids, 80), expected[79:]) < BOUND


def test_layers_of_the_same_rules_share_a_program(default_device: Device) -> None:
    """One program for all windows, one for layers without, however many layers there are."""
    config = small_config("mistral", windows=(20, None, 20, None, 20, None))
    mods = trace_layer_mods(config, 128).bind(default_device)
    assert len({mod.prelude for mod in mods}) == 2
    assert mods[0] is mods[2] is mods[4] and mods[1] is mods[3] is mods[5]


def test_a_window_that_no_text_reaches_costs_nothing(default_device: Device) -> None:
    assert set(trace_layer_mods(FAMILIES["mistral"], WINDOW).bind(default_device)) == {NO_MODS}
    assert set(trace_layer_mods(FAMILIES["ministral3"], 16).bind(default_device)) == {NO_MODS}
    assert NO_MODS not in trace_layer_mods(FAMILIES["ministral3"], 17).bind(default_device)


# ---- chat templates, which come from the checkpoints -------------------------------------------------------------

TEMPLATES = {
    "mistral": "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}",
    "gemma2": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "gemma4": "{%- macro without_thoughts(text) -%}{%- set ns = namespace(kept='') -%}"
    "{%- for part in text.split('<channel|>') -%}"
    "{%- set ns.kept = ns.kept + (part.split('<|channel>')[0] if '<|channel>' in part else part) -%}{%- endfor -%}"
    "{{- ns.kept | trim -}}{%- endmacro -%}"
    "{%- macro described(tool) -%}<|tool>declaration:{{ tool.function.name }}"
    "{%- for name, value in tool.function.parameters.properties | dictsort -%}"
    "{{- ',' if not loop.first }}{{ name }}:{{ value['type'] | upper }}"
    "{%- if value is mapping and value.description is defined -%}({{ value.description }}){%- endif -%}"
    "{%- endfor -%}<tool|>{%- endmacro -%}"
    "{{- bos_token }}{%- if tools or messages[0]['role'] in ['system', 'developer'] -%}<|turn>system\n"
    "{%- if enable_thinking is defined and enable_thinking -%}<|think|>{%- endif -%}"
    "{%- for tool in tools or [] -%}{{- described(tool) }}{%- endfor -%}<turn|>\n{%- endif %}"
    "{%- for message in messages if message.role != 'system' -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{- '<|turn>' + role + '\n' }}{%- if message['content'] is string -%}"
    "{{- without_thoughts(message['content']) if role == 'model' else message['content'] | trim }}"
    "{%- elif message['content'] is sequence -%}{%- for item in message['content'] -%}{{- item['text'] }}{%- endfor -%}"
    "{%- endif -%}{{- '<turn|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|turn>model\n' -}}{%- endif -%}",
    "qwen3": "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}",
    "glm4_moe_lite": "[gMASK]<sop>"
    "{%- macro text_of(content) -%}{%- if content is string -%}{{- content }}"
    "{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}"
    "{{- item.text if item is mapping and item.type == 'text' else item }}{%- endfor -%}"
    "{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}"
    "{%- if tools -%}<|system|>\n{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}"
    "{%- endif -%}"
    "{%- set ns = namespace(last_user_index=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}"
    "{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}<|user|>{{ text_of(m.content) }}"
    "{%- elif m.role == 'assistant' -%}<|assistant|>{%- set content = text_of(m.content) -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] if '</think>' in content else '' -%}"
    "{%- if loop.index0 > ns.last_user_index and thought -%}{{ '<think>' + thought.strip() + '</think>' }}"
    "{%- else -%}{{ '</think>' }}{%- endif -%}{{ content.split('</think>')[-1].strip() }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>"
    "{{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' -}}{%- endif -%}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_give_what_transformers_makes_of_them(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "user", "content": "Hello "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi"},
        {"role": "user", "content": "Bye"},
    ]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template([messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **special)
    ours = render(TEMPLATES[name], messages, add_generation_prompt=True, special_tokens=special)
    assert ours == theirs[0][0]
    if name == "gemma4":
        properties = {"b": {"type": "string", "description": "where"}, "a": {"type": "number"}}
        tools = [{"type": "function", "function": {"name": "find", "parameters": {"properties": properties}}}]
        theirs = render_jinja_template([messages], chat_template=TEMPLATES[name], tools=tools, **special)
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": False}
        assert render(TEMPLATES[name], messages, special_tokens=special, **given) == theirs[0][0]
    if name == "gemma2":
        with pytest.raises(UsageError, match="System role not supported"):
            render(
                TEMPLATES[name],
                [{"role": "system", "content": "x"}],
                add_generation_prompt=True,
                special_tokens=special,
            )
