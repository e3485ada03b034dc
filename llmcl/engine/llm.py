"""LLM: what a Python user holds. Loading, streaming, conversations, logits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from os import PathLike
from threading import Thread
from typing import Any

import numpy as np

from llmcl.attention.mods import MaskMod, ScoreMod
from llmcl.checkpoint import Checkpoint, open_checkpoint
from llmcl.checkpoint.quantize import check_quantize
from llmcl.engine.chat import Chat
from llmcl.engine.generation import Begin, Generation, Piece, collect, is_last, pieces
from llmcl.engine.turns import Turn, Turns
from llmcl.errors import ContextLengthError, UsageError, check_whole, shown
from llmcl.kernels.common.dtype import ACTIVATION_DTYPES, QUANTIZED, check_dtype, check_kv_dtype
from llmcl.kernels.implementation import check_only_kernels
from llmcl.models.config import ModelConfig
from llmcl.models.kv_cache import KVCache, KVSequence, capacity_for, kv_bytes_per_position
from llmcl.models.layer_mods import trace_layer_mods
from llmcl.models.memory import check_memory, exact_queries, forecast
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache, pool_pages
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.weights import (
    ModelWeights,
    WeightTypes,
    load_weights,
    random_types,
    random_weights,
    stored_formats,
)
from llmcl.ops.attention_sizes import check_kernel_options
from llmcl.ops.sample import SamplingParams
from llmcl.progress import OPENING, Progress
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer import chat_template as templates
from llmcl.tokenizer.text import StopMatcher

_log = logging.getLogger(__name__)

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]

DEFAULT_CONTEXT = 4096


def load(
    model: str,
    *,
    device: Device | str | int | None = None,
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
) -> LLM:
    """Loads a model onto a device.

    model: "smollm2", a folder with safetensors, a .gguf file, or a hub name such as "org/name".
    device: an index, part of a name, "gpu" or "cpu"; None takes the preferred one. Or a Device that is open.
    dtype: of the weights on the device: "float32", "bfloat16", "float16"; "auto" keeps what the checkpoint
    stores, quantised or not. quantize: "q8_0", "q4_0" or "q4_k" quantises the matrices while loading
    (docs/guide/quantization.md). activation_dtype: where a CPU has fast dot products for that, "auto" rounds what meets
    quantised weights or keys to 8 bits and, in prefill, what meets bfloat16 weights to bfloat16, attention with such
    or quantised weights included; "float32" never. Rounded, a greedy answer may also depend on the number of cores and
    on what the cache held before (docs/guide/quantization.md).
    kv_dtype: of the cache; "auto" is float16, or float32 beside float32 weights; "q8_0" takes half of float16's
    memory. max_context: tokens of prompt and answer together; None: what the model was trained for, at most 4096.
    kv_page_tokens: keeps keys and values in pages of so many tokens (a multiple of 64), so that each conversation has
    a place of its own and those that begin alike share it; None: one contiguous cache. kv_pages: pages for all
    conversations together; None: enough for one of max_context tokens.
    progress(what, done, total) is called while downloading, loading (bytes) and compiling kernels (kernels).
    score_mod(score, b, h, q_idx, kv_idx) and mask_mod(b, h, q_idx, kv_idx) -> bool: Python functions that are compiled
    into the attention of every layer, beside the causal mask (docs/guide/attention.md); b is 0, h the query head, q_idx
    and kv_idx are positions in the text.
    offline: takes models of the hub from the cache only.
    kernel_options: BLOCK_M, BLOCK_N, DV_TILE of prefill's attention, before those that `llmcl tune` stored.
    chat_template: Jinja source, in place of the model's own or for a model that has none.

    Raises a subclass of LlmclError: unknown model or device, damaged or unsupported checkpoint, too little memory
    (forecast before anything is loaded).
    """
    start = time.perf_counter()
    if not isinstance(model, (str, PathLike)) or not str(model):
        raise UsageError(f"model is {shown(model)}; expected smollm2, a path, or a name of the hub")
    _check_sizes(max_context, kv_page_tokens, kv_pages)
    templates.start()  # before all cores pack weights
    checkpoint = open_checkpoint(model, offline=offline, progress=progress)
    with checkpoint:
        trained = checkpoint.config.max_position
        if max_context is not None and max_context > trained:
            _log.warning(
                "a context of %d tokens exceeds the %d that %s was trained for, and beyond them its answers may be no "
                "good; lower it (--ctx-size, max_context)",
                max_context,
                trained,
                model,
            )
        tokenizer = _tokenizer_beside(checkpoint, chat_template)  # while the device packs the weights

        def on_progress(what: str, done: int, total: int) -> None:
            if tokenizer.done():
                tokenizer.result()  # its error now, and not after the last weight
            if progress:
                progress(what, done, total)

        types = _weight_types(checkpoint, dtype, quantize, activation_dtype)
        if progress:
            progress(OPENING, 0, 0)
        llm = _assemble(
            model,
            checkpoint.config,
            None,
            _open_device(device, kernel_options),
            lambda dev: load_weights(dev, checkpoint, types, on_progress),
            types,
            kv_dtype,
            max_context,
            kv_page_tokens,
            kv_pages,
            score_mod,
            mask_mod,
            progress,
        )
        llm.tokenizer = tokenizer.result()
    llm.load_ms = (time.perf_counter() - start) * 1e3
    return llm


def load_random(
    shape: str,
    *,
    device: Device | str | int | None = None,
    dtype: str = "bfloat16",
    activation_dtype: str = "auto",
    kv_dtype: str = "auto",
    max_context: int | None = None,
    kv_page_tokens: int | None = None,
    kv_pages: int | None = None,
    kernel_options: Mapping[str, int] | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> LLM:
    """A model of real shape with random weights made on the device, to measure speed without a download.

    shape: a name in random_shapes.RANDOM_SHAPES, such as "llama-3.2-1b", or the path of a config.json. It has no
    tokenizer: prompts are token ids, and pieces have no text. dtype: as in `load`, or "q8_0", "q4_0" and the other
    quantised types (docs/guide/quantization.md): random numbers and scales, embedding and output head of 8 bits.

    Raises a subclass of LlmclError, as `load` does.
    """
    start = time.perf_counter()
    _check_sizes(max_context, kv_page_tokens, kv_pages)
    config = random_shape_config(shape)
    exact = _is_exact(activation_dtype)
    types = random_types(config, config.dtype if dtype == "auto" else dtype, exact_activations=exact)
    if progress:
        progress(OPENING, 0, 0)
    llm = _assemble(
        f"random {shape}",
        config,
        None,
        _open_device(device, kernel_options),
        lambda dev: random_weights(dev, config, types, seed, progress),
        types,
        kv_dtype,
        max_context,
        kv_page_tokens,
        kv_pages,
        progress=progress,
    )
    llm.load_ms = (time.perf_counter() - start) * 1e3
    return llm


def _check_sizes(max_context: int | None, kv_page_tokens: int | None, kv_pages: int | None) -> None:
    for name, size in (("max_context", max_context), ("kv_page_tokens", kv_page_tokens), ("kv_pages", kv_pages)):
        if size is not None:
            check_whole(name, size)


def _tokenizer_beside(checkpoint: Checkpoint, chat_template: str | None) -> Future[Tokenizer]:
    """Makes the tokenizer in a thread of its own, for which neither Ctrl-C nor the end of the program waits."""
    future: Future[Tokenizer] = Future()

    def make() -> None:
        try:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            if chat_template is not None:
                tokenizer.use_chat_template(chat_template)
            future.set_result(tokenizer)
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    Thread(target=make, name="tokenizer", daemon=True).start()
    return future


def _open_device(request: Device | str | int | None, kernel_options: Mapping[str, int] | None) -> Device:
    device = Device.open(request)
    device.kernel_options = check_kernel_options(kernel_options or {})
    return device


def _weight_types(checkpoint: Checkpoint, dtype: str, quantize: str | None, activation_dtype: str) -> WeightTypes:
    if dtype in QUANTIZED:
        raise UsageError(
            f"dtype is {dtype!r}, which only random weights can be; quantize (--quantize) {dtype} quantises"
        )
    if dtype != "auto":
        check_dtype(dtype, "dtype")
    exact = _is_exact(activation_dtype)
    if quantize is not None:
        check_quantize(quantize)
        if dtype != "auto":
            raise UsageError(f"dtype is {dtype!r} with quantize {quantize!r}; give one of them, the other left out")
    elif dtype != "auto" or checkpoint.config.dtype != "quantized":
        return WeightTypes(checkpoint.config.dtype if dtype == "auto" else dtype, exact_activations=exact)
    return WeightTypes("native", stored_formats(checkpoint, quantize), exact)


def _is_exact(activation_dtype: str) -> bool:
    if activation_dtype not in ACTIVATION_DTYPES:
        raise UsageError(f"activation_dtype is {activation_dtype!r}; expected {' or '.join(ACTIVATION_DTYPES)}")
    return activation_dtype == "float32"


def _assemble(
    name: str,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    device: Device,
    make_weights: Callable[[Device], ModelWeights],
    types: WeightTypes,
    kv_dtype: str,
    max_context: int | None,
    kv_page_tokens: int | None = None,
    kv_pages: int | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    progress: Progress | None = None,
) -> LLM:
    dtype = types.name(config)
    if kv_dtype == "auto":
        kv_dtype = "float32" if dtype == "float32" else "float16"
    check_kv_dtype(kv_dtype, config.head_dim)
    if max_context is None:
        max_context = min(config.max_position, DEFAULT_CONTEXT)
    mods = trace_layer_mods(config, max_context, score_mod, mask_mod)
    mods.check(config.n_q_heads, max_context)
    kv_tokens = capacity_for(max_context)
    if kv_page_tokens is not None:
        kv_tokens = kv_page_tokens * pool_pages(max_context, kv_page_tokens, kv_pages)
    elif kv_pages is not None:
        raise UsageError(f"kv_pages is {kv_pages} without kv_page_tokens; give the tokens of a page as well, e.g. 64")
    check_only_kernels(device, "float32", kv_dtype, types.dtype)
    check_memory(forecast(config, types, kv_dtype, max_context, device, kv_tokens), device)
    exact = exact_queries(types, kv_dtype)
    cache: KVCache  # first: it fails at once where a buffer is too large
    if kv_page_tokens is None:
        cache = KVCache(device, config, max_context, kv_dtype, exact_queries=exact)
    else:
        cache = PagedKVCache(device, config, max_context, kv_dtype, kv_page_tokens, kv_pages, exact_queries=exact)
    weights = make_weights(device)
    model = Model(device, config, weights, cache, mods=mods.bind(device), progress=progress)
    return LLM(name, model, tokenizer, dtype, kv_dtype)


def _are_ids(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and all(isinstance(part, (int, np.integer)) for part in prompt)


class LLM:
    """A model on a device, ready to generate. Use it as a context manager, or call `close()`.

    config, tokenizer (None for random weights), device, model_name, dtype, kv_dtype, max_context (tokens), load_ms.
    One thing at a time: the next call of the thread that reads an answer ends what could still come of it. For other
    threads the model is busy until the answer ends, is closed or is collected: UsageError, or with wait=True they wait.
    """

    def __init__(self, name: str, model: Model, tokenizer: Tokenizer | None, dtype: str, kv_dtype: str):
        self.model_name = name
        self._model: Model | None = model
        self.config = model.config
        self.device = model.device
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.max_context = model.cache.max_context
        self.load_ms = 0.0
        self.turns = Turns(name)
        self._said_no_template = False
        self._prompts = model.cache.sequence()  # where everything goes that is no conversation

    @property
    def model(self) -> Model:
        """The weights, the KV cache and the kernels. Raises UsageError once they were given back by `close`."""
        if (model := self._model) is None:
            raise self.turns.closed_error()
        return model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    def encode(self, prompt: Prompt, *, raw: bool = False, system_prompt: str | None = None) -> list[int]:
        """Token ids of a prompt: text (through the chat template unless `raw` or there is none), messages, or ids."""
        if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray)):
            raise UsageError(
                f"the prompt is {shown(prompt)}; expected text, messages [{{'role': ..., 'content': ...}}], or "
                "token ids"
            )
        if _are_ids(prompt):
            ids: list[int] = np.asarray(prompt, np.int64).tolist()
            return ids
        if self.tokenizer is None:
            raise UsageError(f"{self.model_name} has no tokenizer; expected token ids as the prompt")
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                if system_prompt is not None:
                    reason = "raw prompts" if raw else f"{self.model_name}, which has no chat template,"
                    raise UsageError(f"system_prompt has no place in {reason}; put it into the prompt")
                if not raw and not self._said_no_template:
                    self._said_no_template = True
                    _log.warning(
                        "%s has no chat template, so the prompt is given to it as it is; --raw (raw=True) says that "
                        "this is meant, --chat-template-file (chat_template) gives it one",
                        self.model_name,
                    )
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        messages: list[Message] = [*prompt]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return self.tokenizer.encode_chat(messages)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        raw: bool = False,
        system_prompt: str | None = None,
        sequence: KVSequence | None = None,
        progress: Progress | None = None,
        wait: bool = False,
        begin: Begin | None = None,
    ) -> Turn[Piece]:
        """Yields a Piece for each token as it is made; closing the generator stops the work.

        prompt: text, messages [{"role": ..., "content": ...}], or token ids. Sampling parameters: see SamplingParams.
        stop: strings that end the answer and are not part of it. raw: no chat template. sequence: the place in the KV
        cache to go on from (a conversation's); None: an empty context. progress(what, done, total): called while the
        prompt is read, with its tokens; reading waits for the device a few times more. wait: until no other thread
        generates. begin: for conversations, called with what makes the answer once nothing else is under way.

        Raises (before the first token) ContextLengthError for a prompt longer than the context, UsageError for a value
        out of range, or where another thread generates.
        """
        ids = self.encode(prompt, raw=raw, system_prompt=system_prompt)
        params = SamplingParams(temperature, top_k, top_p, min_p, repeat_penalty, seed=seed)
        check_whole("max_tokens", max_tokens)
        StopMatcher(stop)  # its errors, and those of the ids, now and not at the first token
        self._check_prompt(ids)

        def answer(ids: list[int], sequence: KVSequence | None) -> Generator[Piece, None, None]:
            self._check_prompt(ids)
            if sequence is None:
                self.clear()
            else:
                self.model.cache.activate(sequence, ids)
            return pieces(
                self.model,
                self.tokenizer,
                ids,
                params.seeded(),
                max_tokens=max_tokens,
                stop=stop,
                ignore_eos=ignore_eos,
                reuse_cache=sequence is not None,
                load_ms=self.load_ms,
                progress=progress,
            )

        return self.turns.begin(lambda: begin(answer) if begin else answer(ids, sequence), is_last, wait=wait)

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise UsageError("the prompt has no tokens; expected at least one")
        if len(ids) > self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the context {self.max_context}; shorten the prompt or raise the "
                "context (--ctx-size, max_context)"
            )
        self.model.check_vocabulary(ids)

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """The whole answer at once; arguments as in `stream`."""
        encoding = {name: options.pop(name) for name in ("raw", "system_prompt") if name in options}
        ids = self.encode(prompt, **encoding)
        return collect(ids, self.stream(ids, **options))

    def chat(self) -> Chat:
        """A conversation that keeps its KV cache from turn to turn."""
        return Chat(self)

    def logits(self, token_ids: Sequence[int], *, wait: bool = False) -> np.ndarray:
        """Logits after every token of a text: token_ids int [n_tokens] -> float32 [n_tokens, vocab], for evaluation.

        Raises UsageError for no ids or ids that the vocabulary lacks, ContextLengthError for more than the context.
        wait: as in `stream`.
        """
        if not _are_ids(token_ids):
            raise UsageError(f"token_ids is {shown(token_ids)}; expected token ids, as `encode` gives them")
        ids = list(token_ids)

        def work() -> np.ndarray:
            self.clear()
            return self.model.logits(ids)

        return self.turns.call(work, wait=wait)

    def reset(self, *, wait: bool = False) -> None:
        """Ends what this thread generates; what comes next starts with an empty context. wait: as in `stream`."""
        self.turns.call(self.clear, wait=wait)

    def clear(self) -> None:
        """Within a turn: what comes next starts with an empty context."""
        self.model.cache.activate(self._prompts)
        self.model.cache.truncate(0)

    def close(self) -> None:
        """Ends what is generated, after its step, and gives the device's memory back; then nothing can be generated.

        Another thread that reads an answer gets UsageError.
        """
        self.turns.close()
        self.device.close()
        self._model = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- measuring ----------------------------------------------------------------------------------

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.model.weights.decode_bytes()

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of the KV cache that a decode step reads for each position it attends to."""
        return kv_bytes_per_position(self.config, self.kv_dtype)

    def bench_prefill(self, n_tokens: int) -> float:
        """Seconds to prefill n_tokens random tokens into an empty context, as llama-bench's pp test."""
        ids = self._bench_tokens(n_tokens)

        def work() -> float:
            self.clear()
            return self._seconds(self.model.prefill, ids)

        return self.turns.call(work)

    def bench_decode(self, n_tokens: int, depth: int = 0) -> list[float]:
        """Seconds of each of n_tokens single-token decodes after `depth` tokens: llama-bench's tg test, no sampling."""
        ids = self._bench_tokens(n_tokens + depth)

        def work() -> list[float]:
            self.clear()
            if depth:
                self.model.prefill(ids[:depth])
            return [self._seconds(self.model.decode_token, token) for token in ids[depth:]]

        return self.turns.call(work)

    def _seconds(self, step: Callable[[Any], None], tokens: Any) -> float:
        self.device.finish()
        start = time.perf_counter()
        step(tokens)
        self.device.finish()
        return time.perf_counter() - start

    def _bench_tokens(self, n: int) -> list[int]:
        return [int(i) for i in np.random.default_rng(0).integers(0, self.config.vocab_size, n)]
