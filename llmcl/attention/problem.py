"""The sizes and dtypes of a flex_attention call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl.attention.arrays import PAGE_TABLE, SINKS, dtype_of
from llmcl.errors import UsageError, counted
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, PrefillTiles
from llmcl.runtime.device import Device

Strides = tuple[int, int, int]  # elements between neighbouring batches (in a pool: pages), heads and rows


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and requested results of a call."""

    batch: int
    n_q_heads: int
    n_kv_heads: int
    n_queries: int
    n_keys: int
    width: int  # columns of query and key
    value_width: int  # columns of value
    head_dim: int  # columns the kernels compute with, at least `width` and `value_width`
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    scale: float
    return_lse: bool
    return_max_scores: bool
    own_inputs: bool  # arrays come from the host
    sinks: bool = False
    page_tokens: int = 0  # keys per page; 0 without a page table
    n_pages: int = 0  # pages per sequence
    pool_pages: int = 0  # pages in the pool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the user's arrays and the results, by name."""
        rows = (self.batch, self.n_q_heads, self.n_queries)
        kv = (self.batch, self.n_kv_heads, self.n_keys)
        if self.page_tokens:
            kv = (self.pool_pages, self.n_kv_heads, self.page_tokens)
        array_shapes: dict[str, tuple[int, ...]] = {
            "query": (*rows, self.width),
            "key": (*kv, self.width),
            "value": (*kv, self.value_width),
        }
        if self.page_tokens:
            array_shapes[PAGE_TABLE] = (self.batch, self.n_pages)
        if self.sinks:
            array_shapes[SINKS] = (self.n_q_heads,)
        return {**array_shapes, "out": (*rows, self.value_width), "lse": rows, "max_scores": rows}

    def results(self) -> tuple[str, ...]:
        """Returns the names of the requested results, in order."""
        asked = {"lse": self.return_lse, "max_scores": self.return_max_scores}
        return "out", *(name for name, wanted in asked.items() if wanted)

    @property
    def group_rows(self) -> int:
        """Number of queries, over all heads that share a KV head."""
        return self.n_queries * self.n_q_heads // self.n_kv_heads

    def strides(self) -> list[Strides | None]:
        """Returns `element_strides` for query, key and value in C order."""
        shapes = self.shapes()
        return [(heads * n * d, n * d, d) for _, heads, n, d in (shapes[name] for name in ("query", "key", "value"))]

    def lie_alike(self, strides: Sequence[Strides | None]) -> bool:
        """Whether a kernel can read arrays with these dtypes, widths and strides in place."""
        fits = (
            self.q_dtype == self.kv_dtype
            and self.width == self.value_width
            and all(array_strides is not None and max(array_strides) <= MAX_STRIDE for array_strides in strides)
        )
        if not fits or not self.page_tokens:
            return fits
        _, key, value = strides
        assert key is not None and value is not None
        # The distance between pages must be a whole number of rows, equal for keys and values.
        return key[0] % key[2] == 0 and key[0] * value[2] == value[0] * key[2]

    def read_in_place(self, device: Device, tiles: PrefillTiles, mask_keys: int) -> bool:
        """Whether the kernel for these tiles can read the arrays in place. mask_keys: keys per block in the block mask,
        0 without a mask."""
        # A key tile must lie within a page.
        together = not self.page_tokens or (self.page_tokens | mask_keys) % CAPACITY_MULTIPLE == 0
        return together and tiles.implementation.reads_arrays(device, self.kv_dtype, self.width)


MAX_STRIDE = (1 << 31) - 1  # kernels read strides as int32


def checked_shapes(arrays: Mapping[str, Any], enable_gqa: bool, mask_length: int | None) -> dict[str, Any]:
    """Returns the sizes for a Problem. mask_length: keys in the block mask. Raises UsageError for
    inconsistent shapes."""
    for name in ("query", "key", "value"):
        array = arrays[name]
        if array.ndim != 4 or dtype_of(array) is None:
            raise UsageError(
                f"{name} is {array.dtype} {list(array.shape)}; expected a floating point array [B, H, L, D] (bfloat16 "
                "as its bits in uint16)"
            )
    query, key, value = (arrays[name].shape for name in ("query", "key", "value"))
    table = arrays.get(PAGE_TABLE)
    batch, n_q_heads, n_queries, width = query
    fit = key[:3] == value[:3] and key[3] == width and min(*query, *key, *value) >= 1
    if not fit or (table is None and key[0] != batch):
        pool = "[pages, Hkv, keys of a page, D]" if table is not None else "[B, Hkv, S, D]"
        raise UsageError(
            f"query {list(query)}, key {list(key)} and value {list(value)} do not fit; expected [B, Hq, L, D], {pool} "
            "and the same with any number of columns for value, no dimension 0"
        )
    n_kv_heads = key[1]
    if n_q_heads != n_kv_heads and (not enable_gqa or n_q_heads % n_kv_heads):
        raise UsageError(
            f"query has {counted(n_q_heads, 'head')}, key {n_kv_heads}; expected equal numbers, or with "
            "enable_gqa=True a multiple"
        )
    sinks = arrays.get(SINKS)
    if sinks is not None and (sinks.shape != (n_q_heads,) or sinks.dtype.kind != "f"):
        raise UsageError(
            f"sinks is {sinks.dtype} {list(sinks.shape)}; expected floats [{n_q_heads}], one for each head"
        )
    sizes = {
        "sinks": sinks is not None,
        "batch": batch,
        "n_q_heads": n_q_heads,
        "n_kv_heads": n_kv_heads,
        "n_queries": n_queries,
        "n_keys": key[2],
        "width": width,
        "value_width": value[3],
    }
    return sizes if table is None else sizes | _checked_pages(table, batch, key, mask_length)


def _checked_pages(table: Any, batch: int, key: Sequence[int], mask_length: int | None) -> dict[str, int]:
    if table.ndim != 2 or table.shape[0] != batch or table.shape[1] < 1 or table.dtype.kind not in "iu":
        raise UsageError(
            f"page_table is {table.dtype} {list(table.shape)}; expected integers [{batch}, pages of a sequence]"
        )
    pool_pages, _, page_tokens, _ = key
    if page_tokens % 16:
        raise UsageError(f"key has {counted(page_tokens, 'key')} a page; expected a multiple of 16")
    n_keys = page_tokens * table.shape[1]
    if mask_length is not None:
        if mask_length > n_keys:
            raise UsageError(
                f"the block mask is for {counted(mask_length, 'key')}, page_table has room for {n_keys}: "
                f"{counted(table.shape[1], 'page')} of {page_tokens}; create it with at most these"
            )
        n_keys = mask_length
    if isinstance(table, np.ndarray):
        needed = table[:, : -(-n_keys // page_tokens)]
        if needed.max() >= pool_pages:
            raise UsageError(f"page_table names page {needed.max()}; expected 0 to {pool_pages - 1}, the pages of key")
    return {"n_keys": n_keys, "page_tokens": page_tokens, "n_pages": table.shape[1], "pool_pages": pool_pages}
