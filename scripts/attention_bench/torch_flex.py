"""PyTorch's compiled flex_attention and scaled_dot_product_attention, and the variants both sides have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_bench.baselines import Contestant
from llmcl.attention import and_masks, masks

CAP, WINDOW, DOCUMENTS = 30.0, 1024, 16


@dataclass(frozen=True)
class Torch:
    """torch, its flex_attention module, and where its tensors are: "cuda" or "cpu"."""

    torch: Any
    flex: Any
    where: str

    @classmethod
    def found(cls, where: str) -> Torch | None:
        try:
            import torch
            from torch.nn.attention import flex_attention as flex
        except ImportError:
            return None
        return cls(torch, flex, where) if where == "cpu" or torch.cuda.is_available() else None

    def tensor(self, array: np.ndarray) -> Any:
        """bfloat16 for uint16."""
        tensor = self.torch.from_numpy(array).to(self.where)
        return tensor.view(self.torch.bfloat16) if array.dtype == np.uint16 else tensor

    def compiled(self) -> Any:
        self.torch._dynamo.reset()  # it compiles eight forms of a function, and no more
        return self.torch.compile(self.flex.flex_attention, dynamic=False)

    def finish(self) -> None:
        if self.where == "cuda":
            self.torch.cuda.synchronize()


@dataclass(frozen=True)
class Variant:
    """ours: (score_mod, mask_mod); theirs: the same for PyTorch. sdpa: whether scaled_dot_product_attention has it, and
    then its is_causal. bfloat16: the arrays are that, and not what those of the other variants are."""

    ours: tuple[Any, Any]
    theirs: Callable[[Torch], tuple[Any, Any]]
    sdpa: bool | None = None
    bfloat16: bool = False


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def large_call_variants(length: int, heads: int) -> dict[str, Variant]:
    """The rows of the table of large calls."""
    ids = (np.arange(length) // max(1, length // DOCUMENTS)).astype(np.int32)

    def their_alibi(torch: Torch) -> tuple[Any, Any]:
        slopes = torch.tensor(masks.alibi_slopes(heads))
        return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), causal

    def their_documents(torch: Torch) -> tuple[Any, Any]:
        documents = torch.tensor(ids)
        return None, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (documents[q_idx] == documents[kv_idx])

    def their_soft_cap(torch: Torch) -> tuple[Any, Any]:
        tanh = torch.torch.tanh
        return lambda score, b, h, q_idx, kv_idx: CAP * tanh(score / CAP), causal

    return {
        "causal": Variant((None, masks.causal), lambda torch: (None, causal), True),
        "ALiBi, causal": Variant((masks.alibi(heads), masks.causal), their_alibi),
        f"soft cap {CAP:g}, causal": Variant((masks.soft_cap(CAP), masks.causal), their_soft_cap),
        f"window {WINDOW}": Variant((None, masks.sliding_window(WINDOW)), lambda torch: (None, window)),
        f"{DOCUMENTS} documents, causal": Variant(
            (None, and_masks(masks.causal, masks.document(ids))), their_documents
        ),
        "every key visible": Variant((None, None), lambda torch: (None, None), False),
        "causal, bfloat16": Variant((None, masks.causal), lambda torch: (None, causal), True, bfloat16=True),
    }


def torch_large_calls(
    where: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, variant: Variant
) -> dict[str, tuple[Contestant, Callable[[], float] | None]]:
    """Contestants by name, on a GPU each with a function that gives the device's milliseconds of a call; none without
    PyTorch there. where: "cuda" or "cpu"."""
    found = Torch.found(where)
    if found is None:
        return {}
    arrays = [found.tensor(x) for x in (q, k, v)]
    score_mod, mask_mod = variant.theirs(found)
    shape = q.shape[2], k.shape[2]
    mask = mask_mod and found.flex.create_block_mask(mask_mod, None, None, *shape, device=where)
    compiled = found.compiled()
    calls = {"torch compiled": lambda: compiled(*arrays, score_mod=score_mod, block_mask=mask, enable_gqa=True)}
    if variant.sdpa is not None:
        sdpa = found.torch.nn.functional.scaled_dot_product_attention
        calls["SDPA"] = lambda: sdpa(*arrays, is_causal=variant.sdpa, enable_gqa=True)
    return {name: _contestant(found, call) for name, call in calls.items()}


def torch_decode_calls(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, page_table: np.ndarray, page: int
) -> dict[str, Contestant]:
    """A query of each sequence against its keys: contiguous, and in the pages of `page_table`, as PyTorch's example of
    paged attention has them (one row of pages for all sequences, the block mask in physical pages). None without CUDA.
    """
    found = Torch.found("cuda")
    if found is None:
        return {}
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    torch, flex = found.torch, found.flex
    (batch, heads, length, width), n = k.shape, page_table.shape[1]
    query, keys, values = (found.tensor(x) for x in (q, k, v))
    pages = PagedAttention(page_table.size, page, batch, device="cuda")
    table = torch.from_numpy(page_table).cuda().long()
    pages.page_table[:, :n] = table
    numbers = torch.arange(page_table.size, device="cuda")
    pages.physical_to_logical[numbers[:batch, None], table] = numbers[None, :n].expand(batch, -1)
    logical = torch.empty_like(numbers)
    logical[table.reshape(-1)] = numbers

    def pooled(x: Any) -> Any:
        by_page = x.view(batch, heads, n, page, width).transpose(0, 1).reshape(heads, batch * n, page, width)
        return by_page[:, logical].reshape(1, heads, -1, width)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < length

    mask = flex.create_block_mask(visible, batch, None, 1, length, device="cuda", BLOCK_SIZE=(128, page))
    mask = pages.convert_logical_block_mask(mask)
    pool = pooled(keys), pooled(values)
    compiled = found.compiled()
    calls = {
        "torch compiled, contiguous": lambda: compiled(query, keys, values, enable_gqa=True),
        "torch compiled, page table": lambda: compiled(query, *pool, block_mask=mask, enable_gqa=True),
    }
    return {name: _contestant(found, call)[0] for name, call in calls.items()}


def _contestant(found: Torch, call: Callable[[], Any]) -> tuple[Contestant, Callable[[], float] | None]:
    last: list[Any] = []
    torch = found.torch

    def run(n: int) -> None:
        with torch.no_grad():
            for _ in range(n):
                last[:] = [call()]

    def device_ms() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run(1)  # so that the device does not wait for the host
        begin.record()
        run(1)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))

    def result() -> np.ndarray:
        array: np.ndarray = last[0].float().cpu().numpy()
        return array

    return Contestant(run, found.finish, result), device_ms if found.where == "cuda" else None
