"""All layers of a decode step in a persistent kernel against the separate launches: every buffer that they leave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from compilers.recording import RecordingDevice
from programs import TINY_SHAPE

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Experts
from llmcl.attention.masks import alibi, sliding_window
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.engine.loading import load_random
from llmcl.kernels.common.persistent import DecodeLayers
from llmcl.kernels.nvidia import persistent_layers
from llmcl.kernels.nvidia.layer_types import LayerTypes, types_word
from llmcl.kernels.nvidia.persistent_layers import NvidiaPersistentLayers
from llmcl.models.kv_cache import KVCache
from llmcl.models.layer_mods import trace_layer_mods
from llmcl.models.model import Model
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.recurrent_blocks import MixerBlock
from llmcl.models.stack import decode_layers, layer_runs, why_separate
from llmcl.models.weights import random_types, random_weights
from llmcl.reference import unpack_keys, unpack_values
from llmcl.runtime.device import Buffer, Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.tools import benchmark

SHAPES = {
    "gqa4": {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gqa3": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8},
}


def family(model_type: str, hidden: int, ffn: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"architectures": None, "model_type": model_type, **sizes, **heads_of, **others}


WINDOW = 200  # less than the prompt, and no multiple of a tile
EVERY_BIAS = {"attention_bias": True, "mlp_bias": True}
GEMMA2 = {"sliding_window": WINDOW, "query_pre_attn_scalar": 200, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 = {**GEMMA2, "sliding_window_pattern": 2, "rope_local_base_freq": 1e4, "rope_theta": 1e6}
FAMILIES = {
    "qwen2": family("qwen2", 448, 1216, 7, 1),  # seven queries a key head
    "qwen2-wide": family("qwen2", 1024, 4864, 16, 4),  # units of gate and up are claimed
    "qwen3": family("qwen3", 256, 704, 4, 2, head_dim=128),
    "qwen3-64": family("qwen3", 256, 704, 9, 3, head_dim=64),
    "llama-biases": family("llama", 256, 4864, 4, 2, **EVERY_BIAS),
    "smollm3": family("smollm3", 512, 1536, 8, 2, no_rope_layer_interval=2, **EVERY_BIAS),
    "granite": family("granite", 512, 1536, 8, 4, residual_multiplier=0.22, attention_multiplier=0.1),
    "mistral": family("mistral", 512, 1536, 8, 2, sliding_window=WINDOW),
    "gemma2": family("gemma2", 512, 1536, 4, 2, head_dim=256, **GEMMA2),
    "gemma2-64": family("gemma2", 256, 704, 4, 1, head_dim=64, **GEMMA2),  # fewer units than work-groups
    "gemma2-wide": family("gemma2", 2304, 9216, 8, 4, head_dim=256, **GEMMA2),
    "gemma3": family("gemma3_text", 640, 2048, 4, 1, head_dim=256, **GEMMA3),
    "gemma3-wide": family("gemma3_text", 2560, 10240, 8, 4, head_dim=128, **GEMMA3),
    "olmo2": family("olmo2", 512, 1536, 8, 8),
    "olmo3": family("olmo3", 2048, 1536, 16, 4, sliding_window=WINDOW),
}
GPT_OSS = {"head_dim": 64, "sliding_window": WINDOW, "num_local_experts": 12, "num_experts_per_tok": 4}
EXPERTS = {
    "qwen3moe": family(
        *("qwen3_moe", 256, 704, 4, 2),
        **{"head_dim": 128, "num_experts": 40, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
    ),
    "qwen3moe-wide": family(  # units of gate and up are claimed
        *("qwen3_moe", 1024, 704, 8, 4),
        **{"head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 576},
        norm_topk_prob=True,
    ),
    "mixtral": family("mixtral", 512, 1536, 8, 2, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": family("olmoe", 512, 256, 4, 4, num_experts=20, num_experts_per_tok=5),
    "gpt-oss": family("gpt_oss", 320, 288, 10, 2, **GPT_OSS),
    "gpt-oss-wide": family("gpt_oss", 1440, 1440, 16, 4, **GPT_OSS),
}
DELTA, SHORT, FULL = "linear_attention", "conv", "full_attention"
LFM2 = {"layer_types": [SHORT, SHORT, FULL, SHORT], "block_auto_adjust_ff_dim": False}


def delta_net(n_k: int, n_v: int, size: int) -> dict[str, Any]:
    heads = {"linear_num_key_heads": n_k, "linear_num_value_heads": n_v, "linear_conv_kernel_dim": 4}
    sizes = {"linear_key_head_dim": size, "linear_value_head_dim": size, "layer_types": [DELTA, DELTA, FULL, DELTA]}
    return {**heads, **sizes}


HYBRIDS = {
    "qwen3_5": family("qwen3_5_text", 256, 2112, 8, 2, head_dim=64, **delta_net(4, 8, 64)),
    "qwen3_5-wide": family("qwen3_5_text", 1024, 4864, 8, 2, head_dim=256, **delta_net(8, 16, 128)),
    "lfm2": family("lfm2", 256, 2112, 4, 2, **LFM2),
    "lfm2-wide": family("lfm2", 2048, 4864, 32, 8, **LFM2),
}
EXPERT_CASES = [(name, dtype) for name in EXPERTS for dtype in ("bfloat16", "mxfp4", "q4_0")]
FAMILIES |= {**EXPERTS, **HYBRIDS}
MIXED = ("qwen2-wide", "gemma2", "olmo2", "mixtral")  # whose rows are blocks of 256
H200 = DeviceEntry(
    index=0,
    name="an H200 that is not here",
    kind="gpu",
    vendor="NVIDIA",
    platform_name="NVIDIA CUDA",
    platform_version="OpenCL 3.0",
    platform_vendor="NVIDIA",
    driver_version="known by its description",
    opencl_version=(3, 0),
    opencl_c_version=(1, 2),
    compute_units=132,
    max_work_group_size=1024,
    local_mem_bytes=48 << 10,
    global_mem_bytes=140 << 30,
    max_alloc_bytes=35 << 30,
    host_available_bytes=None,
    unified_memory=False,
    has_fp16=False,
    has_subgroups=False,
    facts={"ptx_arch": 90},
    is_software=False,
    extensions=(),
    lacks=None,
    device=None,  # type: ignore[arg-type]
)
NORMALISED = {
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen3_5_text",
    "lfm2",
}  # heads: separate launches leave that in qkv


def unsupported_reason(model: Model) -> str | None:
    row = NvidiaPersistentLayers()
    if not row.supports_device(model.device):
        return "the device is not NVIDIA's"
    layers = decode_layers(model.layers, model.decode_ops)
    return layers if isinstance(layers, str) else row.unsupported_reason(model.device, layers)


def config_file(folder: Path, shape: dict[str, Any]) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **shape,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def random_vectors(model: Model, seed: int = 3) -> None:
    """Norms and biases of random weights would be ones and zeros."""
    rng = np.random.default_rng(seed)
    for block in (block for layer in model.weights.layers for block in layer):
        for name, vector in vars(block).items():
            if isinstance(vector, Buffer):
                # A delta net's decay is below 1 where its scalars are negative, as in every checkpoint.
                low, high = (-0.5, 0.5) if "bias" in name else (-1.5, -0.5) if name == "scalars" else (0.5, 1.5)
                model.device.write(vector, rng.uniform(low, high, vector.nbytes // 4).astype(np.float32))


def buffers(model: Model, config: ModelConfig, position: int) -> dict[str, np.ndarray]:
    device, shape = model.device, model.cache.shape
    sizes = {
        "x": config.hidden_size,
        "qkv": (config.n_q_heads + 2 * config.n_kv_heads) * config.head_dim,
        "attended": config.n_q_heads * config.head_dim,
        "ffn": config.intermediate_size,
        "logits": config.vocab_size,
    }
    passed = ["qkv", "attended", "ffn"]
    if experts := [block.settings for blocks in config.layers for block in blocks if isinstance(block, Experts)]:
        del sizes["ffn"], passed[2]
        sizes["expert_rows"] = experts[0].top_k * experts[0].size
        passed.append("expert_rows")
    if experts and config.architecture != "gpt_oss":  # separate launches add a router's bias later
        sizes["router_logits"] = experts[0].n_experts
        passed.append("router_logits")
    if config.architecture in NORMALISED:
        del sizes["qkv"], passed[0]
    if model.cache.states is not None:  # of the last layer, which has no attention
        del sizes["attended"], passed[0]
    found = {name: device.read(getattr(model.act, name), np.float32, (n,)) for name, n in sizes.items()}
    for name in passed:
        whole = device.read(
            model.persistent_intermediates.get(name, getattr(model.act, name)), np.uint32, (sizes[name],)
        )
        found[name] = (whole & ~np.uint32(1)).view(np.float32)  # without flags
    if model.cache.states is not None:
        found |= recurrent_buffers(model)
    for i, (k, v) in enumerate(zip(model.cache.k, model.cache.v, strict=True)):
        if k is None or v is None:  # of a recurrent layer
            continue
        tiles = shape.n_kv_heads, shape.capacity // 16
        if shape.kv_dtype == "q8_0":
            keys = unpack_keys(device.read(k, np.uint8, (*tiles, shape.head_dim // 32, 544)))
            values = unpack_values(device.read(v, np.uint8, (*tiles, shape.head_dim * 17)))
        else:
            turned = device.read(k, np.float16, (*tiles, shape.head_dim, 16)).swapaxes(2, 3)
            keys = turned.reshape(shape.n_kv_heads, shape.capacity, shape.head_dim)
            values = device.read(v, np.float16, keys.shape)
        found[f"k{i}"], found[f"v{i}"] = (rows[:, :position].astype(np.float32) for rows in (keys, values))
    return found


def recurrent_buffers(model: Model) -> dict[str, np.ndarray]:
    """What the last layer mixes and has mixed, and the states of the sequence."""
    device, passed, last = model.device, model.persistent_intermediates, model.layers[-1][0]
    assert isinstance(last, MixerBlock) and model.cache.states is not None
    found = {}
    for name, of_launch, n in (
        ("mixer_in", "mixer_in", last.weights.projection.rows),
        ("mixed", "attended", last.weights.output.k),
    ):
        whole = device.read(passed.get(of_launch, model.act.of(name)), np.uint32, (n,))
        found[name] = (whole & ~np.uint32(1)).view(np.float32)
    slot = model.cache.states.begin(model.cache.sequence(), lambda other: pytest.fail("the sequence has a slot"))
    for layer, states in enumerate(model.cache.states.buffers):
        for name, state in states.items():
            n = state.nbytes // 4 // model.cache.states.n_slots
            found[f"{name} {layer}"] = device.read(state, np.float32, (n,), 4 * n * slot)
    return found


@pytest.mark.parametrize("with_mods", [False, True], ids=["plain", "mods"])
@pytest.mark.parametrize("cached", ["float16", "q8_0"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in ("bfloat16", "float16")), ("gqa4", "q4_0"), ("gqa3", "q8_0")]
    + [("wide", dtype) for dtype in ("q4_0", "q4_k", "q6_k", "q4_k_m", "q5_k_m")],
)
def test_equals_the_separate_launches(
    device: Device, tmp_path: Path, shape: str, dtype: str, cached: str, with_mods: bool
) -> None:
    if device.entry.fact("ptx_arch") < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    # Rounding to 8 bits would make a step of the smallest difference.
    options: dict[str, Any] = {"dtype": dtype, "activation_dtype": "float32", "max_context": 1024}
    loaded = load_random(config_file(tmp_path, SHAPES[shape]), device=device, **options)
    config, weights = loaded.config, loaded.model.weights
    mods = ()
    if with_mods:
        mods = (bind_mods(device, *trace_mods(alibi(config.n_q_heads), sliding_window(300))),) * config.n_layers

    def model(persistent: bool) -> Model:
        cache = KVCache(device, config, 1024, cached)
        return Model(device, config, weights, cache, mods=mods, persistent=persistent)

    check_equal(model(True), model(False))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in FAMILIES if name not in EXPERTS]
    + EXPERT_CASES
    + [(name, "q4_0") for name in ("qwen2", "qwen3", "llama-biases", "gemma2", "gemma3", "gemma2-wide", "olmo3")]
    + [(name, "q4_0") for name in HYBRIDS]
    + [(name, "q4_k_m") for name in MIXED],
)
def test_families_equal_the_separate_launches(device: Device, tmp_path: Path, name: str, dtype: str) -> None:
    if device.entry.fact("ptx_arch") < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    options: dict[str, Any] = {"dtype": dtype, "activation_dtype": "float32", "max_context": 1024}
    shape = {**FAMILIES[name], "num_hidden_layers": 4}
    one = load_random(config_file(tmp_path, shape), device=device, **options).model
    random_vectors(one)
    assert [launch.name for launch in one.decode_launches].count("persistent_layers") == 1
    check_equal(one, separate_launches(one))


def test_layers_that_cannot_are_launches_of_their_own(device: Device, tmp_path: Path) -> None:
    """Layers 1 and 2 of 5 have experts, which a launch has by themselves."""
    if device.entry.fact("ptx_arch") < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [0, 3, 4]}
    shape = family("qwen3_moe", 256, 704, 4, 2, head_dim=128, num_hidden_layers=5, **experts)
    one = load_random(config_file(tmp_path, shape), device=device, max_context=1024).model
    random_vectors(one)
    assert [launch.name for launch in one.decode_launches].count("persistent_layers") == 3
    assert why_separate(one.layers, one.decode_ops) is None
    check_equal(one, separate_launches(one), names=("x", "logits"))


def separate_launches(model: Model) -> Model:
    cache = KVCache(model.device, model.config, model.cache.max_context, "float16")
    return Model(model.device, model.config, model.weights, cache, mods=model.mods, persistent=False)


def check_equal(one: Model, separate: Model, names: tuple[str, ...] = ()) -> None:
    """The buffers that both leave, or those named and keys and values, in steps after a prompt."""
    config = one.config
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 320, 577).tolist()
    for which in (one, separate):
        which.prefill(which.cache.sequence(), prompt)
    for step in range(40):
        token = int(rng.integers(0, 320))
        for which in (one, separate):
            which.decode_token(which.cache.sequence(), token)
        if step % 13:
            continue
        position = one.cache.sequence().position
        expected = buffers(separate, config, position)
        for name, found in buffers(one, config, position).items():
            if names and name not in names and name[0] not in "kv":
                continue
            error = np.abs(found - expected[name]).max() / np.abs(expected[name]).max()
            # Another number of key splits rounds differently, and a key or value is then rounded to 16 or 8 bits.
            in_8_bits = one.cache.shape.kv_dtype == "q8_0"
            stored, computed = (2.0**-6, 8e-3) if in_8_bits else (2.0**-9, 1e-3)
            assert error < (stored if name[0] in "kv" else computed), (name, step)


@pytest.mark.parametrize(("shape", "dtype"), [("wide", "q4_k"), ("gqa3", "q4_0"), ("wide", "q8_0"), ("wide", "q4_k_m")])
def test_rounded_activations_are_the_same_to_the_bit(device: Device, tmp_path: Path, shape: str, dtype: str) -> None:
    """A first token, whose attention is the same however the keys are split."""
    if device.entry.fact("ptx_arch") < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    loaded = load_random(config_file(tmp_path, SHAPES[shape]), device=device, dtype=dtype, max_context=64)
    config, weights = loaded.config, loaded.model.weights
    found = []
    for persistent in (True, False):
        model = Model(device, config, weights, KVCache(device, config, 64, "float16"), persistent=persistent)
        assert unsupported_reason(model) is None
        model.decode_token(model.cache.sequence(), 5)
        found.append(buffers(model, config, 1))
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_decodes_the_same_twice(device: Device, tmp_path: Path, dtype: str) -> None:
    if device.entry.fact("ptx_arch") < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    llm = load_random(config_file(tmp_path, SHAPES["wide"]), device=device, dtype=dtype, max_context=512)
    prompt = list(range(100))
    first = llm.generate(prompt, max_tokens=200, ignore_eos=True).token_ids
    assert llm.generate(prompt, max_tokens=200, ignore_eos=True).token_ids == first


def test_other_devices_keep_separate_launches(default_device: Device, tmp_path: Path) -> None:
    if default_device.entry.fact("ptx_arch") >= 80:
        pytest.skip("this device is an NVIDIA GPU")
    llm = load_random(config_file(tmp_path, TINY_SHAPE), device=default_device, max_context=64)
    assert "NVIDIA" in str(unsupported_reason(llm.model))
    assert why_separate(llm.model.layers, llm.model.decode_ops) is None


def recorded(
    folder: Path, shape: dict[str, Any], dtype: str, others: Mapping[str, str] = MappingProxyType({})
) -> tuple[Model, list[dict[str, Any]]]:
    """A model on an H200 that is not here, and the constants of its launches. others: formats by parts of names."""
    config = random_shape_config(config_file(folder, {**shape, "num_hidden_layers": 4}))
    device = RecordingDevice(H200)
    types = random_types(config, dtype, exact_activations=True)
    changed = {name: format for name in types.formats for part, format in others.items() if part in name}
    weights = random_weights(device, config, replace(types, formats={**types.formats, **changed}))
    mods = trace_layer_mods(config, 1024).bind(device)
    model = Model(device, config, weights, KVCache(device, config, 1024, "float16"), mods=mods)
    sources = [launch.source for launch in model.decode_launches if launch.name == "persistent_layers"]
    return model, [dict(source.constants) for source in sources]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, "bfloat16", marks=[pytest.mark.slow] * ("-" in name))
            for name in FAMILIES
            if name not in EXPERTS
        ),
        *(pytest.param(name, "q4_0", marks=pytest.mark.slow) for name in FAMILIES if name not in EXPERTS),
        *EXPERT_CASES,
    ],
)
def test_every_family_is_one_launch_of_an_h200(tmp_path: Path, name: str, dtype: str) -> None:
    model, [constants] = recorded(tmp_path, FAMILIES[name], dtype)
    assert why_separate(model.layers, model.decode_ops) is None
    top_k = constants.get("TOP_K", 1)
    assert constants["SPLIT_K"] == (1 if dtype == "q4_0" or (dtype == "mxfp4" and top_k % 2) else 2)
    assert constants.get("ROUTER_IS_FLOAT") == (1 if name in EXPERTS and dtype == "q4_0" else None)
    assert constants.get("EXPERT_WEIGHT") == ("mxfp4" if dtype == "mxfp4" else None)
    vectors = {word for word in constants if word.startswith("AT_") and constants[word] >= 0}
    expected = {"AT_QKV", "AT_K", "AT_V", "AT_OUTPUT", "AT_GATE_UP", "AT_DOWN"}
    expected |= {"AT_ROUTER"} if name in EXPERTS else set()
    expected |= {"AT_MIXER", "AT_CONV_STATES"} if name in HYBRIDS else set()
    expected |= {"AT_MATRIX_STATES", "AT_ATTENTION_GATE"} if name.startswith("qwen3_5") else set()
    expected |= {f"AT_{vector.upper()}" for layer in model.weights.layers for vector in vectors_of(layer)}
    assert vectors - {"AT_ROPE", "AT_RULES"} == expected
    assert ("AT_ROPE" in vectors) == name.startswith(("gemma3", "olmo3", "smollm3"))
    assert ("AT_RULES" in vectors) == (name.startswith(("gemma", "olmo3", "gpt"))) == (constants["N_RULES"] == 2)


@pytest.mark.parametrize("name", MIXED)
def test_weights_of_two_types_are_one_launch_of_an_h200(tmp_path: Path, name: str) -> None:
    model, [constants] = recorded(tmp_path, FAMILIES[name], "q4_k_m")
    assert why_separate(model.layers, model.decode_ops) is None
    names = "WEIGHT", "OTHER_WEIGHT", "SPLIT_K", "OTHER_PRODUCTS"
    assert [constants[name] for name in names] == ["q4_k", "q6_k", 1, 0b10010]
    layers = decode_layers(model.layers, model.decode_ops)
    assert isinstance(layers, DecodeLayers)
    values = FAMILIES[name]["num_key_value_heads"] * model.config.head_dim // 16
    for i, layer in enumerate(layers.layers):
        expected = (layer.qkv.n_tiles - values) << 8 | 0b10010 if i > 1 else layer.qkv.n_tiles << 8
        assert types_word(layer, LayerTypes("q4_k", "q6_k")) == expected


@pytest.mark.parametrize(
    ("shape", "formats", "reason"),
    [
        ("olmo2", {"1.self_attn.o_proj": "Q5_K"}, "q4_k, q5_k, q6_k; a launch has two quantised types at most"),
        ("olmo2", {"1.self_attn.o_proj": "F16"}, "float16, q4_k, q6_k"),
        ("olmo2", {"2.self_attn.q_proj": "Q6_K"}, "in several buffers"),
        ("qwen3_5-wide", {"in_proj_qkv": "Q4_K"}, "beside recurrent layers or attention with a gate"),
        ("lfm2-wide", {}, "weights are of one type, not q4_k, q6_k"),
    ],
)
def test_types_that_cannot_be_one_launch(tmp_path: Path, shape: str, formats: dict[str, str], reason: str) -> None:
    model, _ = recorded(tmp_path, FAMILIES[shape], "q4_k_m", formats)
    layers = decode_layers(model.layers, model.decode_ops)
    assert isinstance(layers, DecodeLayers)
    assert reason in str(NvidiaPersistentLayers().unsupported_reason(model.device, layers))


def vectors_of(layer: Sequence[Any]) -> Iterator[str]:
    """As DecodeLayer names them."""
    for block, kind in zip(layer, ("attention", "mlp"), strict=True):
        for name, vector in vars(block).items():
            if isinstance(vector, Buffer):
                yield f"{kind}_{name}" if name in ("norm", "post_norm") else name


def test_columns_are_shared_where_the_local_memory_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, [constants] = recorded(tmp_path, SHAPES["wide"], "bfloat16")
    layers = decode_layers(model.layers, model.decode_ops)
    assert constants["SPLIT_K"] == 2 and not isinstance(layers, str)
    needed = persistent_layers._local_bytes(model.device, layers, 1)
    monkeypatch.setitem(persistent_layers.LOCAL_BYTES, 90, needed)
    model, [constants] = recorded(tmp_path, SHAPES["wide"], "bfloat16")
    assert constants["SPLIT_K"] == 1
    monkeypatch.setitem(persistent_layers.LOCAL_BYTES, 90, needed - 1)  # addresses of all layers take too much
    assert [len(run.layers) for run in layer_runs(model.layers, model.decode_ops)] == [3, 1]
    monkeypatch.setitem(persistent_layers.LOCAL_BYTES, 90, needed // 2)
    assert "bytes of local memory" in str(why_separate(model.layers, model.decode_ops))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_key_head_dim": 48}, "heads of 48 for keys and 64 for values"),
        ({"linear_num_value_heads": 136, "num_attention_heads": 136}, "136 heads"),
        ({"linear_num_value_heads": 16}, "leaves other rows"),
        ({"intermediate_size": 704}, "another number of work-groups"),
    ],
)
def test_hybrids_that_cannot_be_one_launch(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    shape = {**HYBRIDS["qwen3_5"], **changes}
    model, _ = recorded(tmp_path, shape, "bfloat16")
    layers = decode_layers(model.layers, model.decode_ops)
    assert isinstance(layers, DecodeLayers)
    assert reason in str(NvidiaPersistentLayers().unsupported_reason(model.device, layers))


def test_layers_that_are_separate_for_one_reason_are_named_together(tmp_path: Path) -> None:
    mixers = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
    shape = {**TINY_SHAPE, "architectures": None, "model_type": "qwen3_5_moe_text", "layer_types": mixers, **experts}
    model, launches = recorded(tmp_path, shape, "bfloat16")
    assert launches == []
    reason = "it has an expert that every token goes to"
    assert why_separate(model.layers, model.decode_ops) == f"layers 0 to 3: {reason}"


@pytest.mark.slow
def test_runs_of_layers(default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many neighbours as a launch can have are one; of the others the reason is said."""
    shape = {**TINY_SHAPE, "num_hidden_layers": 6}
    llm = load_random(config_file(tmp_path, shape), device=default_device, max_context=64)
    model, row = llm.model, NvidiaPersistentLayers

    def reason(_: NvidiaPersistentLayers, device: Device, step: DecodeLayers) -> str | None:
        numbers = [model.cache.k.index(layer.k) for layer in step.layers]
        return "too big" if {2, 3} & {*numbers} else "too many" if len(numbers) > 1 and numbers[-1] == 5 else None

    monkeypatch.setattr(row, "supports_device", lambda row, device: True)
    monkeypatch.setattr(row, "unsupported_reason", reason)
    runs = layer_runs(model.layers, model.decode_ops)
    assert [(run.first, len(run.layers), run.why) for run in runs] == [
        (0, 2, None),
        (2, 2, "too big"),
        (4, 1, None),
        (5, 1, None),
    ]
    assert why_separate(model.layers, model.decode_ops) == "layers 2 to 3: too big"
    notes: list[str] = []
    benchmark.run(llm, benchmark.BenchmarkPlan(n_prompt=(), n_gen=(2,), generate_tokens=0, repetitions=1), notes.append)
    assert "decode is not one kernel: layers 2 to 3: too big" in notes
