"""Products of few rows in one launch against a launch for each: what is joined, and on a device the same results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compilers.recording import RecordingDevice
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.nvidia import few_rows_chain
from llmcl.kernels.nvidia.attention import HopperAttentionPrefill
from llmcl.kernels.nvidia.few_rows_chain import NvidiaFewRowsChain, chains, most_tiles
from llmcl.models.batch import Batch, make_batch
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.weights import random_types, random_weights
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.device import Device
from llmcl.runtime.program import KernelSource

SHAPE = {
    **TINY_SHAPE,
    "architectures": None,
    "hidden_size": 256,
    "intermediate_size": 704,
    "head_dim": 64,
    "vocab_size": 1000,
}
CONTEXT, PAGE = 256, 64
EXPERTS: dict[str, dict[str, Any]] = {  # each token takes all of them, so that rounding chooses no others
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "sliding_window": 64},
    "qwen3_moe": {"num_experts": 24, "num_experts_per_tok": 24, "moe_intermediate_size": 256, "norm_topk_prob": True},
}
WIDE = {"hidden_size": 2304}
OF_GEMMA = {"query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64}


def shape_file(folder: Path, ffn: int = SHAPE["intermediate_size"], **others: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**SHAPE, "intermediate_size": ffn, **others}))
    return str(path)


def recorded(
    device: Device, folder: Path, dtype: str, ptx_arch: int, *, invariant: bool = False, **shape: Any
) -> Batch:
    """A batch of 20 sequences, bound for a GPU that is described."""
    facts = {**device.entry.facts, "ptx_arch": ptx_arch}
    entry = replace(device.entry, kind="gpu", facts=facts, compute_units=132, local_mem_bytes=48 << 10)
    gpu, config = RecordingDevice(entry), random_shape_config(shape_file(folder, **shape))
    weights = random_weights(gpu, config, random_types(config, dtype))
    cache = PagedKVCache(gpu, config, CONTEXT, "float16", PAGE, n_sequences=20)
    return Batch(Model(gpu, config, weights, cache, logit_rows=20, step_rows=100), 20, 100, invariant=invariant)


@pytest.mark.parametrize(("dtype", "norms"), [("bfloat16", 1), ("q4_0", 5)])
def test_all_layers_are_one_launch(dtype: str, norms: int, default_device: Device, tmp_path: Path) -> None:
    """A norm and a product; of each of two layers attention, output, gate and up, down, and the next product. Beside
    quantised weights each norm is a link."""
    batch = recorded(default_device, tmp_path, dtype, 90)
    assert list(batch.decoding.bound) == [8, 16, 32]
    for rows, bound in batch.decoding.bound.items():
        names = [launch.name for launch in bound.launches]
        assert names == ["embed", "few_rows_chain"]
        chain = bound.launches[1]
        assert chain.args[3] == norms + 1 + 2 * 5  # links
        assert chain.groups(1) == chain.groups(rows)
        joined = [launch for chain in chains(bound.separate, rows) for launch in chain]
        assert joined == [*bound.separate]


@pytest.mark.parametrize(("family", "dtype"), [("gpt_oss", "mxfp4"), ("gpt_oss", "bfloat16"), ("qwen3_moe", "q4_0")])
def test_layers_with_experts_are_one_launch(family: str, dtype: str, default_device: Device, tmp_path: Path) -> None:
    """From norm to norm: router, who goes where, gate and up, down; a bias of the attention's output is the norm's."""
    batch = recorded(default_device, tmp_path, dtype, 90, model_type=family, **EXPERTS[family])
    for rows, bound in batch.decoding.bound.items():
        assert [launch.name for launch in bound.launches] == ["embed", "few_rows_chain"]
        source = bound.launches[1].source
        assert isinstance(source, KernelSource)
        assert all(f"inline void {unit}" in source.prelude for unit in ("router_unit", "choose_unit", "experts_unit"))
        assert [launch for chain in chains(bound.separate, rows) for launch in chain] == [*bound.separate]


def test_a_mixture_that_other_launches_interrupt_is_no_link(default_device: Device, tmp_path: Path) -> None:
    """An expert that every token goes to stands between the router and the others."""
    shared = {"shared_intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2}
    batch = recorded(default_device, tmp_path, "bfloat16", 90, model_type="granitemoeshared", **shared)
    names = [launch.name for launch in batch.decoding.bound[8].launches]
    assert "experts_few_rows" in names and "choose_experts" in names


def recorded_prompt(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, *, kv_dtype: str = "float16", **shape: Any
) -> BoundLaunches:
    """The launches for a prompt of up to 16 tokens, bound for a GPU that is described."""
    monkeypatch.setattr(
        HopperAttentionPrefill, "supports_device", lambda self, device: device.entry.fact("ptx_arch") == 90
    )
    facts = {**device.entry.facts, "ptx_arch": 90}
    entry = replace(device.entry, kind="gpu", facts=facts, compute_units=132, local_mem_bytes=48 << 10)
    gpu, config = RecordingDevice(entry), random_shape_config(shape_file(folder, **shape))
    weights = random_weights(gpu, config, random_types(config, "bfloat16"))
    bound = Model(gpu, config, weights, PagedKVCache(gpu, config, CONTEXT, kv_dtype, PAGE))._prefill[0]
    assert bound.max_tokens == 16
    return bound.every


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_short_prompt_is_one_launch(
    family: str, default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention with what appends its keys, and products; norms of heads, where there are such."""
    bound = recorded_prompt(default_device, tmp_path, monkeypatch, model_type=family)
    assert [launch.name for launch in bound.launches] == ["embed", "few_rows_chain"]
    separate = [launch.name for launch in bound.separate]
    assert separate.count("rope_append") == separate.count("attention_prefill") + 1 == SHAPE["num_hidden_layers"]
    chain = bound.launches[1].source
    assert isinstance(chain, KernelSource)
    assert chain.prelude.count("inline void attention_prompt_unit") == 1
    assert (
        chain.prelude.count("inline void rope_append_unit") == 1
    )  # of the last layer, whose queries are the last token's


def test_many_layers_are_one_launch(default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more buffers than a driver takes as arguments, 4352 bytes."""
    bound = recorded_prompt(default_device, tmp_path, monkeypatch, num_hidden_layers=90)
    assert [launch.name for launch in bound.launches] == ["embed", "few_rows_chain"]
    assert len(bound.launches[1].args) == 6


def test_a_prompts_attention_to_other_keys_is_no_link(
    default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a copy of keys of 8 bits, which what appends them does not write."""
    bound = recorded_prompt(default_device, tmp_path, monkeypatch, kv_dtype="q8_0")
    names = [launch.name for launch in bound.launches]
    assert names.count("attention_prefill") == [launch.name for launch in bound.separate].count("attention_prefill") > 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_biases_and_head_norms_are_links(family: str, default_device: Device, tmp_path: Path) -> None:
    batch = recorded(default_device, tmp_path, "bfloat16", 90, model_type=family)
    bound = batch.decoding.bound[16]
    assert [launch.name for launch in bound.launches] == ["embed", "few_rows_chain"]
    assert [launch.name for launch in bound.separate].count("qkv_adjust") == SHAPE["num_hidden_layers"]


@pytest.mark.parametrize(("family", "dtype"), [("gemma2", "q4_0"), ("gemma3_text", "bfloat16")])
def test_norms_of_what_a_block_gives_are_links(family: str, dtype: str, default_device: Device, tmp_path: Path) -> None:
    """Each together with the norm before the next block."""
    bound = recorded(default_device, tmp_path, dtype, 90, model_type=family, **OF_GEMMA).decoding.bound[8]
    names = [launch.name for launch in bound.launches]
    assert names.count("few_rows_chain") == 1 and "rms_norm" not in names and len(names) <= 3
    assert [launch.name for launch in bound.separate].count("rms_norm") == 1 + 4 * SHAPE["num_hidden_layers"]


def test_no_more_rows_are_adjusted_than_there_are(default_device: Device) -> None:
    """A batch of two sequences, whose step has the launches for eight rows."""
    facts = {**default_device.entry.facts, "ptx_arch": 90}
    gpu = RecordingDevice(replace(default_device.entry, kind="gpu", facts=facts, compute_units=132))
    qkv, bias = gpu.alloc(2 * 4 * 12 * 64, "qkv"), gpu.alloc(4 * 12 * 64, "bias")
    (launch,) = qkv_adjust(gpu, qkv, bias, None, n_q_heads=8, n_kv_heads=2, head_dim=64, eps=1e-5)
    assert few_rows_chain._link(launch, 8, 8, 264, 1 << 16).n_groups == 2 * 2


@pytest.mark.parametrize(
    ("dtype", "n_q_heads", "warps"), [("bfloat16", 4, 8), ("bfloat16", 8, 4), ("q4_0", 8, 8), ("q4_0", 16, 4)]
)
def test_warps_of_a_chain(dtype: str, n_q_heads: int, warps: int, default_device: Device, tmp_path: Path) -> None:
    """Eight where attention has room for them; beside weights of 16 bits, where its groups are small."""
    heads = {"num_attention_heads": n_q_heads, "num_key_value_heads": 1, "head_dim": 256}
    batch = recorded(default_device, tmp_path, dtype, 90, **heads)
    found = {launch.local for launch in batch.decoding.bound[8].launches if launch.name == "few_rows_chain"}
    assert found == {(32 * warps,)}


@pytest.mark.parametrize(
    ("dtype", "n_tiles", "rows", "tiles"),
    [
        ("q4_0", 1792, 8, 4),
        ("q4_0", 1024, 8, 2),
        ("q4_0", 1024, 16, 4),
        ("q4_k", 384, 32, 2),
        ("bfloat16", 1792, 32, 2),
    ],
)
def test_tiles_of_a_group(dtype: str, n_tiles: int, rows: int, tiles: int) -> None:
    assert most_tiles(dtype, n_tiles, rows, places=264) == tiles


@pytest.mark.parametrize(
    ("dtype", "rows", "more"), [("q4_0", 32, 4 * 8), ("q4_k", 16, 4 * 8), ("q4_k", 32, 0), ("bfloat16", 16, 0)]
)
def test_columns_of_two_groups(
    dtype: str, rows: int, more: int, default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers output and down, each of 8 groups of two tiles."""
    groups = recorded(default_device, tmp_path, dtype, 90, ffn=768).decoding.bound[rows].launches[1].groups(1)[0]
    monkeypatch.setattr(few_rows_chain, "K_PARTS", 1)
    whole = recorded(default_device, tmp_path, dtype, 90, ffn=768).decoding.bound[rows].launches[1].groups(1)[0]
    assert groups - whole == more


@pytest.mark.parametrize(("ffn", "parts"), [(2112, 2), (2176, 4)])
def test_columns_of_groups_that_meet(
    ffn: int, parts: int, default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers down alone has columns enough, and 8 groups of two tiles."""
    groups = recorded(default_device, tmp_path, "bfloat16", 90, ffn=ffn).decoding.bound[16].launches[1].groups(1)[0]
    monkeypatch.setattr(few_rows_chain, "MEETING_PARTS", ())
    whole = recorded(default_device, tmp_path, "bfloat16", 90, ffn=ffn).decoding.bound[16].launches[1].groups(1)[0]
    assert groups - whole == 2 * 8 * (parts - 1)


@pytest.mark.parametrize(("ffn", "first"), [(7168, [19]), (6144, [])])
def test_groups_that_begin_early_take_more_columns(
    ffn: int, first: list[int], default_device: Device, tmp_path: Path
) -> None:
    """Of the second 264 places 448 groups of gate and up leave 80, where the first of each two of 72 groups begin."""
    launch = recorded(default_device, tmp_path, "bfloat16", 90, ffn=ffn, **WIDE).decoding.bound[16].launches[1]
    assert isinstance(launch.source, KernelSource)
    found = re.findall(r"^#define FIRST_STEPS (\d+)$", launch.source.prelude, re.MULTILINE)
    assert [int(steps) for steps in found] == first


def test_what_was_not_measured_is_separate_launches(
    default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose rows have the same bits in steps of any number of rows; and many rows."""
    invariant = recorded(default_device, tmp_path, "bfloat16", 90, invariant=True)
    assert all(bound.launches is bound.separate for bound in invariant.decoding.bound.values())
    monkeypatch.setattr(few_rows_chain, "MOST_ROWS", 8)
    few = recorded(default_device, tmp_path, "bfloat16", 90)
    assert [rows for rows, bound in few.decoding.bound.items() if bound.launches is bound.separate] == [16, 32]


def test_other_gpus_have_separate_launches(default_device: Device, tmp_path: Path) -> None:
    batch = recorded(default_device, tmp_path, "bfloat16", 80)
    assert all(bound.launches is bound.separate for bound in batch.decoding.bound.values())


# The second has the columns of an MLP in parts, each with a counter of its own; the seventh's groups take four tiles.
# Beside quantised weights the columns of output and down are those of several groups; so are those of down with 2112
# and 2176, and of both with 7168, where the first of two groups has more of them.
@pytest.fixture(
    scope="module",
    params=[
        ("llama", "bfloat16", 704),
        ("llama", "float16", 1536),
        ("llama", "bfloat16", 2112),
        ("llama", "bfloat16", 2176),
        ("llama", "bfloat16", 7168),
        ("llama", "q4_0", 704),
        ("llama", "q4_k", 1536),
        ("llama", "q4_0", 9216),
        ("qwen2", "bfloat16", 704),
        ("qwen3", "q4_0", 704),
        ("gpt_oss", "mxfp4", 256),
        ("gpt_oss", "bfloat16", 256),
        ("qwen3_moe", "q4_0", 256),
        ("qwen3_moe", "q6_k", 512),
        ("gemma2", "q4_0", 704),
        ("gemma3_text", "bfloat16", 704),
    ],
)
def llm(
    request: pytest.FixtureRequest, default_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    if not NvidiaFewRowsChain().supports_device(default_device):
        pytest.skip("a Hopper GPU is needed")
    family, dtype, ffn = request.param
    others = EXPERTS.get(family, OF_GEMMA if family.startswith("gemma") else WIDE if ffn == 7168 else {})
    shape = shape_file(tmp_path_factory.mktemp("shape"), ffn, model_type=family, **others)
    with llmcl.load_random(shape, device=default_device.entry, dtype=dtype, max_context=CONTEXT) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.mark.parametrize("n", [1, 8, 13, 20])
def test_the_same_logits_as_separate_launches(n: int, llm: LLM) -> None:
    batch = make_batch(llm.model, n, CONTEXT, PAGE)
    rng = np.random.default_rng(n)
    sequences = [batch.cache.sequence() for _ in range(n)]
    for sequence in sequences:
        batch.start(sequence, SamplingParams(seed=0))
    lengths = range(30, CONTEXT, 10)  # of one KV split and of several
    batch.read(
        [(sequence, rng.integers(0, 1000, k).tolist()) for sequence, k in zip(sequences, lengths, strict=False)]
    )()
    for sequence in sequences:
        batch.cache.prepare(batch.step_state, sequence, 1, batch.slot(sequence))
        batch._slots.enter(sequence)
    batch._begin_step(sequences)
    bound = next(bound for rows, bound in batch.decoding.bound.items() if n <= rows)
    rows = next(rows for rows in batch.decoding.bound if n <= rows)
    listed = ListedStep(bound.separate, batch.step_state, CONTEXT, rows)
    parts = NvidiaFewRowsChain().bind(llm.device, listed).parts
    assert len(parts) < len(bound.separate)
    logits = []
    for launches in (bound.separate, parts, parts):  # twice: the counters are 0 again
        llm.device.fill(batch.model.act.logits, np.float32(np.nan))
        batch.model.run(launches, n)
        logits.append(llm.device.read(batch.model.act.logits, np.float32, (n, 1000)))
    worst = float(np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max())
    assert worst < 0.02  # other sums of 16-bit products
    np.testing.assert_array_equal(logits[2], logits[1])


def check_a_prompt(llm: LLM, n: int, before: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompt's logits, and those of a token that meets the keys that it has left, against separate launches. The
    names of the launches.
    """
    model, ids = llm.model, np.random.default_rng(n).integers(0, 1000, before + n).tolist()
    i = next(i for i, bound in enumerate(model._prefill) if n <= bound.max_tokens)
    bound = model._prefill[i]
    listed = ListedStep(bound.every.separate, model.step, CONTEXT, bound.max_tokens)
    separate = replace(bound, every=BoundLaunches(llm.device, listed, persistent=False))
    logits, following = [], []
    for launches in (separate, bound, bound):
        monkeypatch.setattr(model, "_prefill", [*model._prefill[:i], launches, *model._prefill[i + 1 :]])
        llm.sequence.token_ids.clear()
        if before:
            model.prefill(llm.sequence, ids[:before])
        model.prefill(llm.sequence, ids[before:])
        logits.append(llm.device.read(model.act.logits, np.float32, (1000,)))
        model.decode_token(llm.sequence, 7)
        following.append(llm.device.read(model.act.logits, np.float32, (1000,)))
    for found in (logits, following):
        assert float(np.abs(found[1] - found[0]).max() / np.abs(found[0]).max()) < 0.02
        np.testing.assert_array_equal(found[2], found[1])
    return [launch.name for launch in bound.every.launches]


@pytest.mark.parametrize(("n", "before"), [(2, 21), (16, 21), (16, 0), (7, 200), (29, 150)])
def test_a_short_prompt(n: int, before: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After tokens that are no whole tiles of the cache, after none, and after those of several splits."""
    names = check_a_prompt(llm, n, before, monkeypatch)
    if any(mods.prelude for mods in llm.model.mods):  # windows and soft caps of prompts are launches of their own
        assert "few_rows_chain" in names or n > 16
    else:
        assert names == ["embed", "few_rows_chain"]


def test_a_short_prompt_with_sinks(default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second of three layers, the others of which have windows; each token takes all experts."""
    if not NvidiaFewRowsChain().supports_device(default_device):
        pytest.skip("a Hopper GPU is needed")
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
    shape = shape_file(
        tmp_path, model_type="gpt_oss", num_hidden_layers=3, layer_types=layers, sliding_window=16, **experts
    )
    with llmcl.load_random(shape, device=default_device.entry, max_context=CONTEXT) as llm:  # type: ignore[arg-type]
        names = check_a_prompt(llm, 16, 100, monkeypatch)
        separate = [launch.name for launch in llm.model._prefill[0].every.separate]
        assert names.count("attention_prefill") == separate.count("attention_prefill") - 1


def test_a_short_prompt_with_pages(default_device: Device, tmp_path: Path) -> None:
    """The same bits as without: what differs is where keys and values lie."""
    if not NvidiaFewRowsChain().supports_device(default_device):
        pytest.skip("a Hopper GPU is needed")
    shape, logits = shape_file(tmp_path), []
    ids = np.random.default_rng(0).integers(0, 1000, 150).tolist()
    for pages in ({}, {"kv_page_tokens": PAGE}):
        with llmcl.load_random(shape, device=default_device.entry, max_context=CONTEXT, **pages) as llm:  # type: ignore[arg-type]
            assert len(llm.model._prefill[0].every.launches) == 2
            for part in (ids[:137], ids[137:]):
                llm.model.prefill(llm.sequence, part)
            logits.append(llm.device.read(llm.model.act.logits, np.float32, (1000,)))
    np.testing.assert_array_equal(logits[1], logits[0])
