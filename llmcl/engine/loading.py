"""From a name to an LLM: opens checkpoint and device, checks the memory, loads the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

from llmcl.architectures.config import ModelConfig
from llmcl.attention.mods import MaskMod, ScoreMod
from llmcl.checkpoint import Checkpoint, checked_name, open_checkpoint
from llmcl.checkpoint.embedding_settings import embedding_settings
from llmcl.checkpoint.lora import AdapterChoice, LoraRequest, merge, open_adapter, why_not_merged
from llmcl.checkpoint.quantize import check_quantize, warn_of_rounding_again
from llmcl.checkpoint.sampling_defaults import sampling_defaults
from llmcl.engine.images import images_for
from llmcl.engine.judging import judging_head
from llmcl.engine.llm import LLM
from llmcl.engine.speculation import speculation_with
from llmcl.engine.split import Devices, Memory, SplitRequest, Splitter, memories
from llmcl.errors import UnsupportedModelError, UsageError, check_flags, check_function, check_whole, shown
from llmcl.kernels.common.dtype import ACTIVATION_DTYPES, QUANTIZED, check_dtype, check_kv_dtype
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.kernels.table import check_only_kernels
from llmcl.models.kv_cache import KVCache, capacity_for
from llmcl.models.layer_mods import trace_layer_mods
from llmcl.models.layer_span import LayerSpan
from llmcl.models.memory import batch_bytes, check_memory, exact_queries
from llmcl.models.paged_kv_cache import PagedKVCache, pool_pages
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.recurrent_blocks import checked_ops
from llmcl.models.stages import Part, model_of
from llmcl.models.weights import (
    ModelWeights,
    WeightTypes,
    load_weights,
    random_types,
    random_weights,
    stored_formats,
)
from llmcl.ops.attention_sizes import check_kernel_options
from llmcl.progress import OPENING, Progress
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer import chat_template as templates

_log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class CacheRequest:
    """The caller's KV cache settings (see `load`). Raises UsageError for impossible values."""

    kv_dtype: str
    max_context: int | None
    page_tokens: int | None
    pages: int | None

    def __post_init__(self) -> None:
        sizes = ("max_context", self.max_context), ("kv_page_tokens", self.page_tokens), ("kv_pages", self.pages)
        for name, size in sizes:
            if size is not None:
                check_whole(name, size)
        if self.pages is not None and self.page_tokens is None:
            raise UsageError(
                f"kv_pages is {self.pages} without kv_page_tokens; give the tokens of a page as well, e.g. 64"
            )

    def dtype(self, weights: str) -> str:
        if self.kv_dtype == "auto":
            return "float32" if weights == "float32" else "float16"
        return self.kv_dtype

    def context(self, config: ModelConfig) -> int:
        """Returns the tokens per sequence."""
        return min(config.max_position, DEFAULT_CONTEXT) if self.max_context is None else self.max_context

    def tokens(self, max_context: int) -> int:
        """Returns the tokens over all sequences."""
        if self.page_tokens is None:
            return capacity_for(max_context)
        return self.page_tokens * pool_pages(max_context, self.page_tokens, self.pages)


def load(
    model: str,
    *,
    device: Devices = None,
    split: str | None = None,
    split_shares: Sequence[float] | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    activation_dtype: str = "auto",
    kv_dtype: str = "auto",
    max_context: int | None = None,
    kv_page_tokens: int | None = None,
    kv_pages: int | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    kernel_options: Mapping[str, int] | None = None,
    chat_template: str | None = None,
    prompt_lookup: bool = False,
    draft_model: str | None = None,
    mmproj: str | bool | None = None,
    compile_kernels: bool = True,
    lora: str | Sequence[str] = (),
) -> LLM:
    """Loads a model onto a device.

    model: "smollm2", a folder with safetensors, a .gguf file, or a hub name such as "org/name".
    device: an index, part of a name, "gpu" or "cpu"; None takes the preferred device. An open Device also works. A list
    names several devices.
    split: how several devices divide the model (docs/guide/devices.md): "layer" gives each device consecutive layers,
    "auto" takes the best device alone if the model fits on it, and otherwise divides the layers; None is "auto".
    split_shares: each device's share of the layers, such as [3, 1]; None follows the speed and size of the memories.
    dtype: weight type on the device: "float32", "bfloat16", "float16"; "auto" keeps the stored types, quantised or not.
    quantize: "q8_0", "q4_0" or "q4_k" quantises the matrices while loading (docs/guide/quantization.md).
    activation_dtype: with "auto", a device with fast dot products rounds activations that meet quantised weights or
    keys to 8 bits. Prefill on a CPU also rounds activations that meet bfloat16 weights to bfloat16, attention with
    bfloat16 or quantised weights included. "float32" never rounds. With rounding, a greedy answer may also depend on
    the core count and on earlier cache contents (docs/guide/quantization.md).
    kv_dtype: cache type; "auto" is float16, or float32 with float32 weights; "q8_0" takes half the memory of float16.
    max_context: tokens of prompt and answer together; None is the trained length, at most 4096.
    kv_page_tokens: stores keys and values in pages with that many tokens (a multiple of 64), so each conversation keeps
    its own sequence and common beginnings are shared; None is one contiguous cache.
    kv_pages: pages for all conversations together; None allows one conversation of max_context tokens.
    progress(what, done, total): called while downloading, loading (bytes) and compiling kernels (kernels).
    score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h, q_idx, kv_idx) -> bool: Python functions compiled into the
    attention of every layer, beside the causal mask (docs/guide/attention.md); b is 0, h the query head, q_idx and
    kv_idx are positions in the text.
    offline: takes hub models from the cache only.
    kernel_options: BLOCK_M, BLOCK_N, DV_TILE for prefill attention; they override the values stored by `llmcl tune`.
    chat_template: Jinja source that replaces or adds the model's template.
    mmproj: the vision tower of a GGUF model, an mmproj-*.gguf file; None looks beside the model, or in its repository
    on the hub, once a prompt has an image (docs/guide/images.md); False takes no images.
    compile_kernels: False compiles each kernel at first use, for a model that only serves an `engine`.
    lora: LoRA adapters for every text, as [NAME=]PATH[:SCALE]: a PEFT folder or a GGUF file (docs/guide/lora.md).
    prompt_lookup, draft_model: speculative decoding (docs/guide/python.md). Drafts copy the continuation of the same
    tokens earlier in the text, or come from a smaller model with the same vocabulary, named like `model`.

    Raises a subclass of LlmclError: unknown model or device, damaged or unsupported checkpoint, too little memory
    (forecast before anything is loaded).
    """
    start = time.perf_counter()
    model = checked_name(model)
    check_flags(offline=offline, prompt_lookup=prompt_lookup, compile_kernels=compile_kernels)
    check_function("progress", progress)
    where = SplitRequest.of(device, split, split_shares)
    cache = CacheRequest(kv_dtype, max_context, kv_page_tokens, kv_pages)
    requests = [LoraRequest.parse(text) for text in ([lora] if isinstance(lora, str) else lora)]
    if len(names := [each.name for each in requests]) > len({*names}):
        raise UsageError(f"lora (--lora) has the names {', '.join(names)}; expected a different one each: NAME=PATH")
    if prompt_lookup and draft_model is not None:
        raise UsageError(
            f"prompt_lookup (--prompt-lookup) and draft_model (--draft-model) {shown(draft_model)} are both given; "
            "give one of the two"
        )
    if len(where.devices) > 1 and (prompt_lookup or draft_model is not None):
        raise UsageError(
            "speculative decoding (--prompt-lookup, --draft-model) works on one device only; leave it out, or name one "
            "device (--device)"
        )
    templates.start()  # before packing weights occupies all cores
    checkpoint = open_checkpoint(model, offline=offline, progress=progress)
    with checkpoint:
        if prompt_lookup or draft_model is not None:
            _check_verifies(checkpoint.config, model)
        applied = [(open_adapter(each, checkpoint.config, checkpoint.tensors), 1.0) for each in requests]
        beside = why_not_merged([adapter for adapter, _ in applied], checkpoint)
        merged = () if beside else tuple(applied)
        if beside is None:
            merge(checkpoint, applied)
        trained = checkpoint.config.max_position
        if max_context is not None and max_context > trained:
            _log.warning(
                "a context of %d tokens exceeds the %d that %s was trained for, and beyond them its answers may be no "
                "good; lower it (--ctx-size, max_context)",
                max_context,
                trained,
                model,
            )
        tokenizer = _tokenizer_beside(checkpoint, chat_template)  # runs while the device packs weights

        def on_progress(what: str, done: int, total: int) -> None:
            if tokenizer.done():
                tokenizer.result()  # raises the tokenizer's error early, before all weights are loaded
            if progress:
                progress(what, done, total)

        types = _weight_types(checkpoint, dtype, quantize, activation_dtype)
        embedding = embedding_settings(checkpoint)
        if progress:
            progress(OPENING, 0, 0)
        llm = _assemble(
            model,
            checkpoint.config,
            where,
            lambda dev, span: replace(
                load_weights(dev, checkpoint, types, on_progress, span), merged=AdapterChoice(merged).key
            ),
            types,
            cache,
            score_mod,
            mask_mod,
            progress,
            kernel_options=kernel_options,
            compile_kernels=compile_kernels,
        )
        llm.tokenizer = tokenizer.result()
        llm.sampling_defaults = sampling_defaults(checkpoint)
        if embedding.ranking is None and (head := judging_head(checkpoint, llm.tokenizer)) is not None:
            embedding = replace(embedding, ranking=head)
        llm.embedding = embedding
        llm.tensors = checkpoint.tensors
        for adapter, scale in applied[len(merged) :]:
            llm.put_lora(adapter)
            llm.model.adapters.scales[adapter.name] = scale
        llm.adapt_to_defaults()
        llm.images = images_for(model, checkpoint, llm.devices[0], mmproj, offline=offline, progress=progress)
    if prompt_lookup:
        llm.speculation = speculation_with(llm.model, None, progress)
    elif draft_model is not None:
        draft = load(
            draft_model,
            device=llm.device,
            activation_dtype=activation_dtype,
            kv_dtype=kv_dtype,
            max_context=llm.max_context,
            offline=offline,
            progress=progress,
        )
        _check_verifies(draft.config, draft_model)
        if llm.has_tokenizer and draft.has_tokenizer:
            _check_same_tokens(llm, draft)
        llm.speculation = speculation_with(llm.model, draft.model, progress)
    llm.load_ms = (time.perf_counter() - start) * 1e3
    return llm


def load_random(
    shape: str,
    *,
    device: Devices = None,
    split: str | None = None,
    split_shares: Sequence[float] | None = None,
    dtype: str = "bfloat16",
    activation_dtype: str = "auto",
    kv_dtype: str = "auto",
    max_context: int | None = None,
    kv_page_tokens: int | None = None,
    kv_pages: int | None = None,
    kernel_options: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    seed: int = 0,
    compile_kernels: bool = True,
) -> LLM:
    """Returns a model with a real shape and random weights made on the device, to measure speed without a download.

    shape: a name in random_shapes.RANDOM_SHAPES, such as "llama-3.2-1b", or the path of a config.json. The model has no
    tokenizer: prompts are token ids, and pieces have no text. dtype: as in `load`, or "q8_0", "q4_0" or another
    quantised type (docs/guide/quantization.md): random numbers and scales, with 8-bit embedding and output head.
    "q4_k_m" and "q5_k_m" use the tensor formats of llama.cpp files with the same name. compile_kernels: as in `load`.

    Raises a subclass of LlmclError, as `load` does.
    """
    start = time.perf_counter()
    check_function("progress", progress)
    check_whole("seed", seed, 0)
    check_flags(compile_kernels=compile_kernels)
    where = SplitRequest.of(device, split, split_shares)
    cache = CacheRequest(kv_dtype, max_context, kv_page_tokens, kv_pages)
    config = random_shape_config(shape)
    exact = _is_exact(activation_dtype)
    types = random_types(config, config.dtype if dtype == "auto" else dtype, exact_activations=exact)
    if progress:
        progress(OPENING, 0, 0)
    llm = _assemble(
        f"random {shape}",
        config,
        where,
        lambda dev, span: random_weights(dev, config, types, seed, progress, span),
        types,
        cache,
        progress=progress,
        compile_kernels=compile_kernels,
        kernel_options=kernel_options,
    )
    llm.load_ms = (time.perf_counter() - start) * 1e3
    return llm


def memory_needed(
    model: str,
    *,
    max_sequences: int,
    page_tokens: int,
    device: str | None,
    split: str | None,
    split_shares: Sequence[float] | None,
    dtype: str,
    quantize: str | None,
    activation_dtype: str,
    kv_dtype: str,
    max_context: int | None,
    kv_page_tokens: int | None,
    offline: bool,
    progress: Progress | None = None,
) -> list[Memory]:
    """Forecasts the memory for `load` and an engine, without loading.

    max_sequences, page_tokens: the engine's. Other parameters and errors as for `load`.
    """
    request, where = (
        CacheRequest(kv_dtype, max_context, kv_page_tokens, None),
        SplitRequest.of(device, split, split_shares),
    )
    with open_checkpoint(checked_name(model), offline=offline, progress=progress) as checkpoint:
        types, config = _weight_types(checkpoint, dtype, quantize, activation_dtype), checkpoint.config
    context, cache_dtype = request.context(config), request.dtype(types.name(config))
    kv_tokens = page_tokens * max_sequences * pool_pages(context, page_tokens)
    stages = []
    for stage in _splitter(config, types, request).divide(where.open(), where):
        rows = max(max_sequences, min(prefill_chunk(stage.device), max_sequences * context))
        batch = batch_bytes(config, cache_dtype, kv_tokens, max_sequences, rows, stage.span)
        stages.append(replace(stage, needed=stage.needed | {"batch": sum(batch.values())}))
    return memories(stages)


def _splitter(config: ModelConfig, types: WeightTypes, request: CacheRequest) -> Splitter:
    max_context, n_sequences = request.context(config), None if request.page_tokens is None else 1
    kv_dtype = request.dtype(types.name(config))
    return Splitter(config, types, kv_dtype, max_context, request.tokens(max_context), n_sequences)


def _check_verifies(config: ModelConfig, model: str) -> None:
    """Raises UnsupportedModelError for a model that cannot drop a sequence's last tokens."""
    if config.state_bytes:
        raise UnsupportedModelError(
            f"{shown(model)} has recurrent layers, whose state cannot go back to before a rejected token; leave out "
            "speculative decoding (--prompt-lookup, --draft-model), or give a draft model of attention alone"
        )


def _check_same_tokens(llm: LLM, draft: LLM) -> None:
    """Raises UsageError if the vocabularies differ."""
    own, other = llm.tokenizer, draft.tokenizer
    if (token := own.differing_token(other)) is not None:
        raise UsageError(
            f"the draft model {draft.model_name} ({other.n_vocab} tokens) has another vocabulary than {llm.model_name} "
            f"({own.n_vocab}): token {token} is {shown(other.token(token))}, not {shown(own.token(token))}; give a "
            "smaller model of the same family (--draft-model, draft_model)"
        )


def _tokenizer_beside(checkpoint: Checkpoint, chat_template: str | None) -> Future[Tokenizer]:
    """Makes the tokenizer in a daemon thread, so neither Ctrl-C nor the program's end waits for it."""
    future: Future[Tokenizer] = Future()

    def make() -> None:
        try:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            if chat_template is not None:
                tokenizer.use_chat_template(chat_template)
            future.set_result(tokenizer)
        except BaseException as error:  # raised again when the result is read
            future.set_exception(error)

    Thread(target=make, name="tokenizer", daemon=True).start()
    return future


def _weight_types(checkpoint: Checkpoint, dtype: str, quantize: str | None, activation_dtype: str) -> WeightTypes:
    if isinstance(dtype, str) and dtype in QUANTIZED:
        raise UsageError(
            f"dtype is {shown(dtype)}, which only random weights can be; quantize (--quantize) {dtype} quantises"
        )
    if dtype != "auto":
        check_dtype(dtype, "dtype")
    exact = _is_exact(activation_dtype)
    if quantize is not None:
        check_quantize(quantize)
        if dtype != "auto":
            raise UsageError(
                f"dtype is {shown(dtype)} with quantize {shown(quantize)}; give one of them, the other left out"
            )
        warn_of_rounding_again(checkpoint.tensors.values(), quantize)
    elif dtype != "auto" or checkpoint.config.dtype != "quantized":
        return WeightTypes(checkpoint.config.dtype if dtype == "auto" else dtype, exact_activations=exact)
    return WeightTypes("native", stored_formats(checkpoint, quantize), exact)


def _is_exact(activation_dtype: str) -> bool:
    if activation_dtype not in ACTIVATION_DTYPES:
        raise UsageError(f"activation_dtype is {shown(activation_dtype)}; expected {' or '.join(ACTIVATION_DTYPES)}")
    return activation_dtype == "float32"


def _assemble(
    name: str,
    config: ModelConfig,
    where: SplitRequest,
    make_weights: Callable[[Device, LayerSpan], ModelWeights],
    types: WeightTypes,
    request: CacheRequest,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    progress: Progress | None = None,
    *,
    kernel_options: Mapping[str, int] | None = None,
    compile_kernels: bool = True,
) -> LLM:
    devices = where.open()
    for device in devices:
        device.kernel_options = check_kernel_options(kernel_options or {})
    dtype, max_context = types.name(config), request.context(config)
    kv_dtype = request.dtype(dtype)
    for heads in config.kinds_of_heads:
        check_kv_dtype(kv_dtype, heads.size)
    mods = trace_layer_mods(config, max_context, score_mod, mask_mod)
    mods.check(config.n_q_heads, max_context)
    for device in devices:
        check_only_kernels(device, "float32", kv_dtype, types.dtype, others=checked_ops(config))
    stages = _splitter(config, types, request).divide(devices, where)
    if len(stages) == 1:
        check_memory(stages[0].needed, stages[0].device)
    exact = exact_queries(types, kv_dtype)
    device_of = [stage.device for stage in stages for _ in stage.span.layers]
    cache: KVCache  # first: a too large buffer fails at once
    if request.page_tokens is None:
        cache = KVCache(device_of, config, max_context, kv_dtype, exact_queries=exact)
    else:
        paging = request.page_tokens, request.pages
        cache = PagedKVCache(device_of, config, max_context, kv_dtype, *paging, exact_queries=exact)
    weights = [make_weights(stage.device, stage.span) for stage in stages]
    parts = [
        Part(stage.device, stage.span, of_stage, mods.bind(stage.device))
        for stage, of_stage in zip(stages, weights, strict=True)
    ]
    how: dict[str, Any] = {"prepared": compile_kernels, "progress": progress}
    if config.bidirectional:  # a text is read in one step, with kernels compiled when used: no token follows
        how = {"chunk": max_context, "persistent": False, "prepared": False}
    return LLM(name, model_of(parts, config, cache, **how), dtype, kv_dtype)
