"""One engine in a process of its own, driven by lines of JSON: what `compare_llama_cpp.py` starts, one for each.

    python compare_child.py llama.cpp|llmcl|openvino      needs llama_cpp, llmcl or openvino_genai, and NumPy

It needs nothing of the other engines.

A request {"op": name, ...} on standard input is answered by one line of JSON on standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

if sys.argv[1:2] == ["llama.cpp"]:
    import llama_cpp  # noqa: F401  (behind NumPy's C++ library its own crashed, built for CUDA, as it read a vocabulary)

import numpy as np

LOGIT_ROWS = 64
LOG_ERROR = 4  # of ggml_log_level


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python, as llama-bench calls them."""

    def __init__(self) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self._errors: list[str] = []
        self._silence: Any = llama_cpp.llama_log_callback(self._log)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def _log(self, level: int, text: bytes, data: Any) -> None:
        if level == LOG_ERROR:
            self._errors.append(text.decode(errors="replace").strip())

    def about(self) -> dict[str, Any]:
        return {
            "version": f"llama-cpp-python {self.api.__version__}",
            "system": self.api.llama_print_system_info().decode().strip(" |"),
        }

    def load(self, path: str, context: int, threads: int, options: dict[str, Any]) -> None:
        """options: fields of llama_model_params (use_extra_bufts: repack weights) and llama_context_params."""
        api = self.api
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        params = api.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        for name, value in options.items():
            setattr(model if hasattr(model, name) else params, name, value)
        self.model = api.llama_model_load_from_file(path.encode(), model)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}. {' '.join(self._errors[-3:])}")
        self.params = params
        self.context: Any = None
        self._make_context()
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def _make_context(self) -> None:
        if self.context:
            self.api.llama_free(self.context)
        self.context = self.api.llama_init_from_model(self.model, self.params)
        if not self.context:
            said = " ".join(self._errors[-3:])
            raise RuntimeError(f"llama.cpp makes no context of {self.params.n_ctx} tokens. {said}")

    def set_micro_batch(self, n: int) -> None:
        """From now on n tokens of a prompt are computed at once; the cache is empty."""
        self.params.n_ubatch = n
        self._make_context()

    def truncate(self, position: int) -> None:
        memory = self.api.llama_get_memory(self.context)
        if position == 0:
            self.api.llama_memory_clear(memory, False)
        else:
            self.api.llama_memory_seq_rm(memory, 0, position, -1)

    def append(self, ids: list[int]) -> None:
        for start in range(0, len(ids), 2048):  # n_batch
            part = ids[start : start + 2048]
            tokens = (self.api.llama_token * len(part))(*part)
            self._decode(self.api.llama_batch_get_one(tokens, len(part)))
        self.api.llama_synchronize(self.context)

    def logits(self, ids: list[int], skip: int) -> Iterator[np.ndarray]:
        api = self.api
        batch = api.llama_batch_init(LOGIT_ROWS, 0, 1)
        try:
            for start in [*range(0, skip, LOGIT_ROWS), *range(skip, len(ids), LOGIT_ROWS)]:
                part = ids[start : min(start + LOGIT_ROWS, skip if start < skip else len(ids))]
                batch.n_tokens = len(part)
                for i, token in enumerate(part):
                    batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
                    batch.seq_id[i][0], batch.logits[i] = 0, start >= skip
                self._decode(batch)
                if start >= skip:
                    rows = api.llama_get_logits(self.context)
                    yield np.ctypeslib.as_array(rows, (len(part), self.vocab_size)).copy()
        finally:
            api.llama_batch_free(batch)

    def sequences(self, pp: int, tg: int, pl: int) -> float:
        """Seconds of tg steps of pl sequences after prompts of pp tokens, as llama-batched-bench has them."""
        api, ids = self.api, random_tokens(self.vocab_size, pl * pp)
        self.truncate(0)
        batch = api.llama_batch_init(2048, 0, 1)

        def fill(rows: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence, wanted) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wanted
            self._decode(batch)

        try:
            rows = [(ids[s * pp + i], i, s, i == pp - 1) for s in range(pl) for i in range(pp)]
            for start in range(0, len(rows), 2048):
                fill(rows[start : start + 2048])
            api.llama_synchronize(self.context)
            begin = time.perf_counter()
            for step in range(tg):
                fill([(ids[s], pp + step, s, True) for s in range(pl)])
                api.llama_synchronize(self.context)
            return time.perf_counter() - begin
        finally:
            api.llama_batch_free(batch)

    def _decode(self, batch: Any) -> None:
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")

    def quantize(self, source: str, target: str, ftype: str, threads: int) -> None:
        params = self.api.llama_model_quantize_default_params()
        params.ftype = getattr(self.api, f"LLAMA_FTYPE_MOSTLY_{ftype}")
        params.allow_requantize = True
        params.nthread = threads
        status = self.api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
        if status:
            raise RuntimeError(f"llama_model_quantize failed with status {status}")


class Llmcl:
    """llmcl, through the model that the LLM holds."""

    def about(self) -> dict[str, Any]:
        import llmcl

        return {"version": f"llmcl {llmcl.__version__}"}

    def load(
        self, path: str, context: int, threads: int, device: str | None, options: dict[str, Any], random: bool = False
    ) -> None:
        """path: a model; with `random` a shape, which gets random weights. threads: the driver uses all it is given."""
        import llmcl

        load = llmcl.load_random if random else llmcl.load
        self.llm = load(path, device=device, max_context=context, **options)
        self.model = self.llm.model
        self.vocab_size = self.llm.config.vocab_size

    def truncate(self, position: int) -> None:
        self.model.cache.truncate(self.llm.sequence, position)

    def append(self, ids: list[int]) -> None:
        if len(ids) == 1:
            self.model.decode_token(self.llm.sequence, ids[0])
        else:
            self.model.prefill(self.llm.sequence, ids)
        self.llm.device.finish()

    def logits(self, ids: list[int], skip: int) -> Iterator[np.ndarray]:
        for buffer, n in self.model.logit_chunks(self.llm.sequence, ids, skip=skip):
            yield self.llm.device.read(buffer, np.float32, (n, self.vocab_size))

    def prepare(self, pl: int, context: int) -> None:
        """Room for pl sequences of `context` tokens."""
        from llmcl.models.batch import make_batch
        from llmcl.tools.throughput import PAGE_TOKENS

        self.batch = make_batch(self.model, pl, context, PAGE_TOKENS)

    def sequences(self, pp: int, tg: int, pl: int) -> float:
        """Seconds of tg steps of pl sequences after prompts of pp tokens, each token chosen; `prepare` comes first."""
        from llmcl.tools.throughput import run_once

        return run_once(self.llm, self.batch, pp, tg, pl)[1]

    def facts(self) -> dict[str, Any]:
        """What only llmcl can say: the device, its read bandwidth in bytes/s, the bytes that a decode step reads."""
        from llmcl.runtime.roofline import read_bandwidth

        return {
            "device": self.llm.device.entry.label,
            "dtype": self.llm.dtype,
            "bandwidth": read_bandwidth(self.llm.device),
            "weight_bytes": self.llm.weight_bytes_per_token,
            "kv_bytes_per_position": self.llm.kv_bytes_per_position,
        }

    def windows(self, path: str, window: int, limit: int) -> list[list[int]]:
        from llmcl.tools.perplexity import cut, leading_bos

        with open(path, encoding="utf-8") as file:
            ids = self.llm.encode(file.read(), raw=True)
        return cut(ids, window, leading_bos(self.llm), limit)


class OpenVino:
    """OpenVINO GenAI's ContinuousBatchingPipeline, which reads GGUF files itself."""

    def about(self) -> dict[str, Any]:
        import openvino_genai

        return {"version": f"openvino-genai {openvino_genai.__version__}"}

    def load(self, path: str, context: int, threads: int, options: dict[str, Any]) -> None:
        """context: tokens of all sequences together."""
        import openvino
        import openvino_genai

        self.api, self.tensor = openvino_genai, openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = context // 16
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, "ENABLE_MMAP": True, **options}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
        self.vocab_size = len(self.pipeline.get_tokenizer().get_vocab())

    def truncate(self, position: int) -> None:
        pass

    def append(self, ids: list[int]) -> None:
        self._steps(1, 1)

    def sequences(self, pp: int, tg: int, pl: int) -> float:
        """Seconds from the step on that gives the last sequence its first token, for tg tokens more of each."""
        return self._steps(pp, tg + 1, pl)

    def _steps(self, pp: int, n_tokens: int, pl: int = 1) -> float:
        config = self.api.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n_tokens, True, False
        ids = np.array(random_tokens(self.vocab_size, pl * pp), np.int64).reshape(pl, 1, pp)
        handles = [self.pipeline.add_request(i, self.tensor(ids[i]), config) for i in range(pl)]
        begun, begin = [False] * pl, time.perf_counter()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            if not all(begun):
                begun = [known or handle.can_read() for known, handle in zip(begun, handles, strict=True)]
                begin = time.perf_counter()
        return time.perf_counter() - begin


class Server:
    """Answers requests; times them with the engine's own work and nothing else inside. The rest is the engine's."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.filled = -1  # tokens of `_tokens` that the cache holds, -1 for other content

    def load(self, **request: Any) -> dict[str, Any]:
        """Seconds until the first token has been computed: lazily mapped weights are read by then."""
        start = time.perf_counter()
        self.engine.load(**request)
        self.engine.append([0])
        return {"seconds": time.perf_counter() - start}

    def prefill(self, n: int) -> dict[str, Any]:
        ids = random_tokens(self.engine.vocab_size, n)
        self.engine.truncate(0)
        start = time.perf_counter()
        self.engine.append(ids)
        self.filled = n
        return {"seconds": time.perf_counter() - start}

    def decode(self, n: int, depth: int) -> dict[str, Any]:
        """Seconds of n single-token steps after `depth` tokens, whose prefill is not timed."""
        ids = random_tokens(self.engine.vocab_size, depth + n)
        if self.filled < depth:
            self.engine.truncate(0)
            if depth:
                self.engine.append(ids[:depth])
        self.engine.truncate(depth)
        start = time.perf_counter()
        for token in ids[depth:]:
            self.engine.append([token])
        self.filled = depth
        return {"seconds": time.perf_counter() - start}

    def sequences(self, pp: int, tg: int, pl: int) -> dict[str, Any]:
        """Seconds of tg steps of pl sequences after prompts of pp tokens."""
        self.filled = -1
        return {"seconds": self.engine.sequences(pp, tg, pl)}

    def set_micro_batch(self, n: int) -> None:
        self.filled = -1
        self.engine.set_micro_batch(n)

    def score(self, windows: list[list[int]]) -> dict[str, Any]:
        """Negative log-likelihoods, summed, of the tokens that `llmcl perplexity` scores, and the likeliest tokens."""
        loss, top = 0.0, []
        for ids in windows:
            first = len(ids) // 2
            targets = ids[first + 1 :]
            self.engine.truncate(0)
            done = 0
            for rows in self.engine.logits(ids[:-1], first):
                wide = rows.astype(np.float64)
                wide -= wide.max(axis=1, keepdims=True)
                chosen = targets[done : done + len(rows)]
                loss += float(np.log(np.exp(wide).sum(axis=1)).sum() - wide[np.arange(len(rows)), chosen].sum())
                top += [int(i) for i in rows.argmax(axis=1)]
                done += len(rows)
        self.filled = -1
        return {"loss": loss, "top": top}

    def __getattr__(self, op: str) -> Any:
        return getattr(self.engine, op)


def random_tokens(vocab_size: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, vocab_size, n)]


def serve(server: Any, lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answers each line with what the method of `server` returns that the request names."""
    for line in lines:
        request = json.loads(line)
        try:
            done = getattr(server, request.pop("op"))(**request)
            answer(done if isinstance(done, dict) else {"value": done})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def main(servers: dict[str, Callable[[], Any]]) -> None:
    """Serves as the one of `servers` that the command line names."""
    answers = os.fdopen(os.dup(1), "w")  # what a library prints to standard output must not be taken for an answer
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    serve(servers[sys.argv[1]](), sys.stdin, answer)


if __name__ == "__main__":
    main(
        {
            "llama.cpp": lambda: Server(LlamaCpp()),
            "llmcl": lambda: Server(Llmcl()),
            "openvino": lambda: Server(OpenVino()),
        }
    )
