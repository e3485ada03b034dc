"""Caches what flex_attention needs between calls: bound kernels and working memory for each kind of call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from llmcl.attention.arrays import FIXED, HELD, PAGE_TABLE, SINKS, array_form
from llmcl.attention.block_mask import BlockMask
from llmcl.attention.kv_block_ranges import KVBlockRanges, all_keys, kv_block_ranges
from llmcl.attention.mods import bind_mods, makes_floats_of_small_ints
from llmcl.attention.problem import Problem, Strides
from llmcl.attention.tracing.trace import TracedMod
from llmcl.errors import OutOfDeviceMemoryError, UsageError
from llmcl.kernels import table
from llmcl.kernels.common import step_state
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionFewQueries, PackKeys, PrefillTiles
from llmcl.kernels.common.dtype import ITEM_BYTES, KERNEL_NAMES
from llmcl.kernels.common.mods import Mods
from llmcl.runtime.device import Buffer, Device, KernelArg, Launch
from llmcl.runtime.driver_calls import check

# State slots for attention on arrays: see kv_block_ranges.cl.
BATCH_RECORDS, HEAD_RECORDS, GROUP_RECORDS, ORDER, N_PAGES, PAGE_ROWS, ARRAY_BLOCKS, STRIDES = range(
    step_state.N_SLOTS, step_state.N_SLOTS + 8
)
MAX_PLANS = 32
MAX_BYTES = 1 << 28  # working memory for all plans on a device, capped at an eighth of device memory


class FlexPlan:
    """The launches for one kind of call.

    The user's arrays (`query`, `key`, `value`, `page_table`, `sinks`, `out`, `lse`) are bound at each run. For host
    arrays the plan has its own buffers instead.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        tiles: PrefillTiles,
        score_mod: TracedMod | None,
        block_mask: BlockMask | None,
        strides: Sequence[Strides | None] | None = None,
        few: AttentionFewQueries | None = None,
    ):
        """Allocates buffers and binds the launches.

        strides: strides of query, key and value, for a kernel that reads them in place (`Problem.read_in_place`).
        few: the kernel for few queries, if it was picked; it always reads in place.
        """
        self.device = device
        self.problem = problem
        # Host arrays are converted on the host.
        q_dtype = "float32" if problem.own_inputs and strides is None else problem.q_dtype
        out_dtype = "float32" if problem.own_inputs and strides is None else problem.out_dtype
        self.dtypes = dict.fromkeys(("key", "value"), problem.kv_dtype) | FIXED
        self.dtypes |= {"lse": "float32", "max_scores": "float32"}
        self.dtypes |= {"query": q_dtype, "out": out_dtype}
        self.block_mask = block_mask  # keeps the block mask alive, so its id stays unique
        self.buffers: list[Buffer] = []
        self.own: dict[str, Buffer] = {}
        self.launches: list[Launch] = []
        self._open: list[tuple[Launch, int, str]] = []  # arguments that take the user's arrays
        self.kept = False  # in the PlanCache, responsible for releasing the plan
        try:
            self._build(tiles, score_mod, block_mask, strides, few)
        except BaseException:
            self.release()
            raise

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()

    @cached_property
    def result_forms(self) -> dict[str, Any]:
        """Returns the results' device arrays by name, without memory."""
        shapes, names = self.problem.shapes(), self.problem.results()
        return {name: array_form(self.device, shapes[name], HELD[self.dtypes[name]]) for name in names}

    @cached_property
    def _binds(self) -> list[tuple[Callable[[int, Any], None], int, str]]:
        """Returns a setter for each argument that takes a user's array; looked up once."""
        return [(launch.kernel.set_arg, index, name) for launch, index, name in self._open]

    def run(self, arrays: dict[str, Any]) -> None:
        """Enqueues the launches. `arrays`: memory by name, for arrays without a plan buffer."""
        for bind, index, name in self._binds:
            bind(index, arrays[name])
        for launch in self.launches:
            launch.enqueue()

    def _kept(self, buffer: Buffer) -> Buffer:
        self.buffers.append(buffer)
        return buffer

    def _alloc(self, n: int, dtype: str, name: str) -> Buffer:
        return self._kept(self.device.alloc(n * ITEM_BYTES.get(dtype, 4), f"attention {name}"))

    def _launch(
        self, file: str, name: str, constants: dict[str, object], args: list[KernelArg | str], **kw: Any
    ) -> None:
        """Like Device.launch, except that a string argument names a user's array."""
        bound = [self.own.get(arg, self._state) if isinstance(arg, str) else arg for arg in args]
        self.launches.append(self.device.launch(file, name, constants, bound, **kw))
        for index, arg in enumerate(args):
            if isinstance(arg, str) and arg not in self.own:
                self._open.append((self.launches[-1], index, arg))

    def _pad(
        self,
        array: KernelArg | str,
        to: KernelArg | str,
        dtypes: tuple[str, str],
        sizes: tuple[int, ...],
        matrices: int,
        *,
        paged: bool = False,
    ) -> None:
        """Pads a matrix. sizes: rows and columns in `array`, then in `to`. paged: rows of `array` lie in pages."""
        _, _, to_rows, to_columns = sizes
        pages: list[KernelArg | str] = []
        if paged:
            p = self.problem
            pages = [PAGE_TABLE, *map(np.int32, (p.n_pages, p.page_tokens, p.n_kv_heads))]
        self._launch(
            table.op_kernel(self.device, "pad_rows").file,
            "pad_rows",
            {"FROM": KERNEL_NAMES[dtypes[0]], "TO": KERNEL_NAMES[dtypes[1]], "PAGED": paged},
            [array, to, *map(np.int32, sizes), *pages],
            groups=(-(-to_columns // 16), to_rows, matrices),
            local=(16, 1, 1),
        )

    def _build(
        self,
        tiles: PrefillTiles,
        score_mod: TracedMod | None,
        block_mask: BlockMask | None,
        strides: Sequence[Strides | None] | None,
        few: AttentionFewQueries | None,
    ) -> None:
        device, p = self.device, self.problem
        # Key tiles start at multiples of 16. Values that need no padding are read in place.
        capacity = -(-p.n_keys // 16) * 16
        block_m, block_n = tiles.block_m, tiles.block_n
        if few is not None and block_mask is not None:
            block_m, block_n = block_mask.BLOCK_SIZE[0], few.range_keys
        ranges = visible_ranges(block_mask, p, block_m, block_n)
        visited = ranges.ranges
        call_constants: dict[str, object] = {}
        if few is None and tiles.implementation.takes_turns:
            call_constants["ORDER"] = f"state[{ORDER}]"
            order = ranges.longest_first(p.n_q_heads, -(-p.n_queries // tiles.block_m))
            visited = np.concatenate([visited, order])
        records = [ranges.batch_records, ranges.head_records, ranges.group_records, len(ranges.ranges)]
        state = [0] * step_state.N_SLOTS
        state[step_state.CONSTANTS["STATE_N_TOKENS"]] = p.n_queries
        state[step_state.CAPACITY] = capacity if strides is None else p.page_tokens or p.n_keys
        state += [*records, *self._place_in_pages(strides)]
        self._state = self._kept(device.upload(np.array(state, np.int32), "attention state"))
        lists = self._kept(device.upload(visited, "attention KV block ranges"))
        tables = (PAGE_TABLE,) if p.page_tokens and strides is not None else ()
        mods = bind_mods(device, score_mod, None if block_mask is None else block_mask.traced, tables)
        self.buffers.extend(mods.buffers)
        if p.own_inputs:
            for name, shape in p.shapes().items():
                if name not in ("lse", "max_scores") or name in p.results():
                    self.own[name] = self._alloc(int(np.prod(shape)), self.dtypes[name], name)
        sizes = (p.batch, p.n_q_heads, p.n_queries, p.n_keys)
        if score_mod is not None and makes_floats_of_small_ints(score_mod, *sizes):
            call_constants["SMALL_INTS"] = True
        if strides is not None:
            call_constants |= {"ARRAYS": True, "STRIDES": STRIDES, "OUT": KERNEL_NAMES[self.dtypes["out"]]}
            call_constants["ARRAY_BLOCKS"] = f"state[{ARRAY_BLOCKS}]"
            if p.width != p.head_dim:
                call_constants["WIDTH"] = p.width
            if p.page_tokens:
                call_constants["KV_PAGE"] = p.page_tokens
                call_constants["PAGE_TABLE"] = f"({PAGE_TABLE}+get_group_id(2)*state[{N_PAGES}])"
                call_constants["PAGE_ROWS"] = f"state[{PAGE_ROWS}]"
        constants: dict[str, object] = {
            **step_state.CONSTANTS,
            "KV": KERNEL_NAMES[p.kv_dtype],
            "N_Q_HEADS": p.n_q_heads,
            "N_KV_HEADS": p.n_kv_heads,
            "HEAD_DIM": p.head_dim,
            "CAPACITY": f"state[{step_state.CAPACITY}]",
            "SCALE": p.scale,
            "HEADS_FIRST": True,
            "Q_STRIDE": p.head_dim,
            "KV_BLOCK_RANGES": True,
            "BATCH_RECORDS": f"state[{BATCH_RECORDS}]",
            "HEAD_RECORDS": f"state[{HEAD_RECORDS}]",
            "GROUP_RECORDS": f"state[{GROUP_RECORDS}]",
            "LSE": p.return_lse,
            **({"MAX_SCORES": True} if p.return_max_scores else {}),
            **({"HAS_SINKS": True} if p.sinks else {}),
            **call_constants,
        }
        lse: KernelArg | str = "lse" if p.return_lse else lists
        rows: list[KernelArg | str] = ["max_scores"] if p.return_max_scores else []
        rows += [SINKS] if p.sinks else []
        last: list[KernelArg | str] = [lists, *rows, *tables, *mods.buffers]
        if few is None:
            self._bind_many(tiles, mods, constants, capacity if strides is None else None, [lse, *last])
        else:
            self._bind_few(few, mods, constants, lse, last, rows)

    def _bind_many(
        self,
        tiles: PrefillTiles,
        mods: Mods,
        constants: dict[str, object],
        capacity: int | None,
        last: list[KernelArg | str],
    ) -> None:
        """Builds the kernel for many queries. capacity: keys in the padded copy; None reads the arrays in place."""
        p = self.problem
        arrays: list[KernelArg | str] = ["query", "key", "value", "out"]
        if capacity is not None:
            arrays = self._padded(capacity)
            arrays[1] = self._pack_keys(arrays[1], capacity)
        query, key, value, out = arrays
        groups = tiles.implementation.groups(self.device, tiles, p.n_q_heads, p.n_queries, p.batch)
        scratch = tiles.implementation.array_scratch_bytes * int(np.prod(groups)) if capacity is None else 0
        if scratch:
            last.insert(2, self._kept(self.device.alloc(scratch, "attention tensor maps")))
        file = tiles.implementation.file
        constants, heads = tiles.implementation.with_arguments({**constants, **tiles.constants()})
        self._launch(
            file if capacity is not None else tiles.implementation.array_file or file,
            "attention_prefill",
            constants,
            [query, self._state, key, value, out, *last, *heads],
            groups=groups,
            local=tiles.local,
            prelude=mods.prelude,
        )
        if out != "out":
            sizes = (p.n_queries, p.head_dim, p.n_queries, p.value_width)
            self._pad(out, "out", ("float32", self.dtypes["out"]), sizes, p.batch * p.n_q_heads)

    def _bind_few(
        self,
        few: AttentionFewQueries,
        mods: Mods,
        constants: dict[str, object],
        lse: KernelArg | str,
        last: list[KernelArg | str],
        rows: list[KernelArg | str],
    ) -> None:
        """Builds the kernel for few queries, and the kernel that merges split states with the arguments `rows`."""
        p = self.problem
        size_constants, groups, local = few.size(self.device, p.group_rows, p.n_kv_heads, p.batch, p.n_keys)
        constants = constants | size_constants
        splits = int(str(size_constants["N_SPLITS"]))
        part_ml: KernelArg = self._state
        part_acc: KernelArg = self._state
        if splits > 1:
            states = p.batch * p.n_q_heads * p.n_queries * splits
            part_ml = self._alloc(2 * states, "float32", "states of splits")
            part_acc = self._alloc(p.head_dim * states, "float32", "sums of splits")
        arguments = ["query", self._state, "key", "value", part_ml, part_acc, "out", lse, *last]
        self._launch(few.file, few.kernel, constants, arguments, groups=groups, local=local, prelude=mods.prelude)
        if splits > 1:
            self._launch(
                few.file,
                f"{few.kernel}_merge",
                constants,
                [part_ml, part_acc, "out", lse, self._state, *rows],
                groups=(p.n_q_heads, p.n_queries, p.batch),
                local=(p.head_dim // 2, 1, 1),
                prelude=mods.prelude,
            )

    def _place_in_pages(self, strides: Sequence[Strides | None] | None) -> list[int]:
        """Returns the state from N_PAGES on: pages per sequence, rows between pages, number of batches or pages in the
        key and value arrays, array strides."""
        if strides is None:
            return []
        query, key, value = strides
        assert query is not None and key is not None and value is not None
        if not self.problem.page_tokens:
            return [0, 0, self.problem.batch, *query, *key, *value]
        # A page row's offset counts rows from the pool's first row; all sequences share the pool.
        place = [self.problem.n_pages, key[0] // key[2], self.problem.pool_pages]
        return [*place, *query, 0, *key[1:], 0, *value[1:]]

    def _padded(self, capacity: int) -> list[KernelArg | str]:
        """Returns query, key, value, out for the kernels: the user's arrays, or buffers padded with rows or columns."""
        p, paged = self.problem, self.problem.page_tokens > 0
        q_heads, kv_heads = p.batch * p.n_q_heads, p.batch * p.n_kv_heads
        query: KernelArg | str = "query"
        key: KernelArg | str = "key"
        value: KernelArg | str = "value"
        out: KernelArg | str = "out"
        if p.width != p.head_dim or self.dtypes["query"] != "float32":
            query = self._alloc(q_heads * p.n_queries * p.head_dim, "float32", "queries")
            sizes = (p.n_queries, p.width, p.n_queries, p.head_dim)
            self._pad("query", query, (self.dtypes["query"], "float32"), sizes, q_heads)
        if p.width != p.head_dim or paged:
            key = self._alloc(kv_heads * p.n_keys * p.head_dim, p.kv_dtype, "keys")
            sizes = (p.n_keys, p.width, p.n_keys, p.head_dim)
            self._pad("key", key, (p.kv_dtype, p.kv_dtype), sizes, kv_heads, paged=paged)
        if p.value_width != p.head_dim or self.dtypes["out"] != "float32":
            out = self._alloc(q_heads * p.n_queries * p.head_dim, "float32", "output")
        if p.value_width != p.head_dim or capacity != p.n_keys or paged:
            value = self._alloc(kv_heads * capacity * p.head_dim, p.kv_dtype, "values")
            sizes = (p.n_keys, p.value_width, capacity, p.head_dim)
            self._pad("value", value, (p.kv_dtype, p.kv_dtype), sizes, kv_heads, paged=paged)
        return [query, key, value, out]

    def _pack_keys(self, key: KernelArg | str, capacity: int) -> Buffer:
        """Packs the keys into tiles."""
        p, head_dim, kv_heads = self.problem, self.problem.head_dim, self.problem.batch * self.problem.n_kv_heads
        # The kernels may read scores for a whole tile past the last key.
        k_tiles = self._alloc((kv_heads * capacity + CAPACITY_MULTIPLE) * head_dim, p.kv_dtype, "key tiles")
        pack = table.pick(PackKeys, self.device, p.kv_dtype, head_dim)
        size_constants, groups, local = pack.size(head_dim, capacity // 16, kv_heads)
        self._launch(
            pack.file,
            "pack_keys",
            {"KV": KERNEL_NAMES[p.kv_dtype], "HEAD_DIM": head_dim, **size_constants},
            [key, k_tiles, np.int32(p.n_keys), np.int32(capacity)],
            groups=groups,
            local=local,
        )
        return k_tiles


class PlanCache:
    """A device's plans, least recently used first, within MAX_PLANS and MAX_BYTES.

    `lock` is held while a plan runs: its working memory serves a single call at a time.
    """

    def __init__(self, device: Device):
        self.lock = threading.RLock()
        self._max_bytes = min(MAX_BYTES, device.entry.global_mem_bytes // 8)
        self._plans: OrderedDict[Hashable, FlexPlan] = OrderedDict()  # never contains the key None
        self._latest: tuple[Hashable, FlexPlan] | None = None  # the plan used last

    @classmethod
    def of(cls, device: Device) -> PlanCache:
        check()
        plans: PlanCache | None = device.kept.get("flex_attention")
        if plans is None:
            plans = device.kept.setdefault("flex_attention", cls(device))
        return plans

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def nbytes(self) -> int:
        return sum(plan.nbytes for plan in self._plans.values())

    def find(self, key: Hashable | None) -> FlexPlan | None:
        """Returns the plan for `key`, or None."""
        if self._latest is not None and self._latest[0] == key:  # faster than hashing the key
            return self._latest[1]
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            self._latest = key, plan
        return plan

    def add(self, key: Hashable | None, make: Callable[[], FlexPlan]) -> FlexPlan:
        """Builds the plan for `key`. With key None or a too large plan, the caller must release it."""
        try:
            plan = make()
        except OutOfDeviceMemoryError:
            if not self._plans:
                raise
            self.clear()
            plan = make()
        if key is not None and plan.nbytes <= self._max_bytes:
            plan.kept = True
            self._plans[key] = plan
            self._latest = key, plan
            while len(self._plans) > MAX_PLANS or self.nbytes > self._max_bytes:
                self._plans.popitem(last=False)[1].release()
        return plan

    def take_latest(self) -> FlexPlan:
        """Removes and returns the plan used last, so its kernels can be measured alone. The caller must release it."""
        self._latest = None
        return self._plans.popitem()[1]

    def clear(self) -> None:
        for plan in self._plans.values():
            plan.release()
        self._plans.clear()
        self._latest = None


def visible_ranges(block_mask: BlockMask | None, problem: Problem, block_m: int, block_n: int) -> KVBlockRanges:
    """Returns the key ranges visible to each group of `block_m` query rows, in tiles of `block_n` keys."""
    batch, n_heads, n_queries, n_keys = problem.batch, problem.n_q_heads, problem.n_queries, problem.n_keys
    if block_mask is None:
        return all_keys(n_keys)
    b, h, q_len, kv_len = block_mask.shape
    if (q_len, kv_len) != (n_queries, n_keys) or b not in (1, batch) or h not in (1, n_heads):
        raise UsageError(
            f"the block mask is for [B, H, Q_LEN, KV_LEN] = {[b, h, q_len, kv_len]}; expected "
            f"{[batch, n_heads, n_queries, n_keys]}, with B and H either these or 1: create it with these lengths"
        )
    return kv_block_ranges(block_mask, block_m, block_n)
