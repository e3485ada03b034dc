"""One engine with random weights in a process of its own: what `compare_gpu.py` starts, one for each.

    python compare_gpu_child.py llmcl|PyTorch eager|PyTorch compiled

Requests and answers as for compare_child.py. PyTorch's needs torch and transformers, and nothing of llmcl.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compare_child import Llmcl, Server, main, random_tokens

MATRIX_SIZE = 8192


class PyTorch:
    """A model of transformers with random bfloat16 weights and scaled_dot_product_attention.

    Eager: as transformers runs it by default, with a cache that grows. Compiled: a decode step with its argmax is one
    program (mode "reduce-overhead": CUDA graphs), with a static cache just as long as a test needs; in prefill the
    layers are compiled, once for all of them since they are alike.
    """

    def __init__(self, compiled: bool, backend: str = "inductor"):
        self.compiled, self.backend = compiled, backend
        self.caches: dict[int, Any] = {}  # static ones, by length

    def load(self, config: dict[str, Any], device: str, n_prompt: list[int], decodes: list[list[int]]) -> None:
        """Makes the model and runs each prefill length and each decode (n, depth) until all is compiled."""
        import torch as torch_module
        import transformers

        torch: Any = torch_module  # not all of it has types
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU")
        self.torch, self.device = torch, torch.device(device)
        torch.set_grad_enabled(False)
        make: Any = transformers.AutoModelForCausalLM.from_config
        with self.device:
            self.model: Any = make(
                transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self._new_cache: Any = transformers.DynamicCache
        if self.compiled:
            self._new_cache = transformers.StaticCache
            options: dict[str, Any] = {"backend": self.backend, "dynamic": False}
            cuda_graphs = {"mode": "reduce-overhead"} if self.backend == "inductor" else {}
            self._compiled_step = torch.compile(self._step, fullgraph=True, **options, **cuda_graphs)
            self._layer_forwards = [torch.compile(layer.forward, **options) for layer in self.model.model.layers]
        for n in n_prompt:
            self.prefill(n)
        for n, depth in decodes:
            self.decode(n, depth, steps=min(n, 3))  # compiled in the first, recorded in the second, replayed

    def about(self) -> dict[str, Any]:
        import transformers

        name = self.torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        return {"version": f"PyTorch {self.torch.__version__}, transformers {transformers.__version__}", "device": name}

    def prefill(self, n: int) -> dict[str, Any]:
        """Seconds of n tokens in an empty context; of the logits only the last token's."""
        ids = self._ids(n)
        with self._compiled_layers():
            self._synchronize()
            start = time.perf_counter()
            self.model(input_ids=ids, use_cache=not self.compiled, logits_to_keep=1)
            self._synchronize()
        return {"seconds": time.perf_counter() - start}

    def decode(self, n: int, depth: int, steps: int | None = None) -> dict[str, Any]:
        """Seconds of n (or `steps`) greedy steps after `depth` tokens, which are not timed; one wait, at the end."""
        ids = self._ids(depth + 1)
        cache = self._cache(depth + n)
        if depth:
            self.model(input_ids=ids[:, :depth], past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = ids[:, depth:].clone()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(n if steps is None else steps):
            if self.compiled:
                self.torch.compiler.cudagraph_mark_step_begin()
                token = self._compiled_step(token, cache).clone()  # the graph's own output is overwritten
            else:
                token = self._step(token, cache)
        self._synchronize()
        return {"seconds": time.perf_counter() - start}

    def matrix_peak(self) -> dict[str, Any]:
        """Operations a second of a bfloat16 product of square matrices: the best of several."""
        a, b = (self.torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=self.device).bfloat16() for _ in range(2))
        best = float("inf")
        for _ in range(6):
            self._synchronize()
            start = time.perf_counter()
            a @ b
            self._synchronize()
            best = min(best, time.perf_counter() - start)
        return {"value": 2 * MATRIX_SIZE**3 / best}

    def _ids(self, n: int) -> Any:
        return self.torch.tensor([random_tokens(self.model.config.vocab_size, n)], device=self.device)

    def _step(self, token: Any, cache: Any) -> Any:
        return self.model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    def _cache(self, length: int) -> Any:
        """An empty cache. A static one is kept: its addresses are part of the recorded graph."""
        if not self.compiled:
            return self._new_cache(config=self.model.config)
        if length not in self.caches:
            self.caches[length] = self._new_cache(config=self.model.config, max_cache_len=length)
            self._step(self._ids(1), self.caches[length])  # its tensors must exist before anything is compiled
        self.caches[length].reset()
        return self.caches[length]

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        if not self.compiled:
            yield
            return
        layers = self.model.model.layers
        for layer, forward in zip(layers, self._layer_forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()


if __name__ == "__main__":
    main(
        {
            "llmcl": lambda: Server(Llmcl()),
            "PyTorch eager": lambda: PyTorch(compiled=False),
            "PyTorch compiled": lambda: PyTorch(compiled=True),
        }
    )
