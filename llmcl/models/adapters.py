"""LoRA adapters on the device: which are loaded, and their matrices beside each weight that they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import MatrixPlan
from llmcl.checkpoint.formats import encode_floats
from llmcl.checkpoint.lora import HEAD, Adapter, AdapterChoice, check_scale, pairs_moved
from llmcl.checkpoint.tensors import TensorInfo
from llmcl.errors import UnsupportedModelError, UsageError, shown
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.weight import Weight
from llmcl.models.weights import ModelWeights, all_plans, spread
from llmcl.ops.lora import ROWS_AT_ONCE, LowRankWeight
from llmcl.runtime.device import Device

_MERGE_INSTEAD = "llmcl applies it only while it loads BF16, F16 or F32 weights (llmcl.load(lora=...))"
_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class AdaptableModel(Protocol):
    """The parts of a model that adapters need."""

    @property
    def device(self) -> Device: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def weights(self) -> ModelWeights: ...
    @property
    def stages(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class DeviceAdapters:
    """The matrices of adapters beside the weights that they change, by the weight's name."""

    adapters: Sequence[Adapter]  # in the order of the scales
    weights: Mapping[str, LowRankWeight]
    bound: set[str] = field(default_factory=set)  # weights whose products have these beside them

    @property
    def n_bytes(self) -> int:
        return sum(weight.a.nbytes + weight.b.nbytes for weight in self.weights.values())


def put_on_device(
    model: AdaptableModel, tensors: Mapping[str, TensorInfo], adapters: Sequence[Adapter], dtype: str
) -> DeviceAdapters:
    """Uploads adapters. dtype: the storage type of their numbers.

    Raises UnsupportedModelError for a matrix that llmcl changes only while loading, OutOfDeviceMemoryError.
    """
    config, weights = model.config, _weights_by_name(model.weights)
    plans = {plan.name: plan for plan in all_plans(config)}
    if config.tie_embeddings and model.weights.head is not None:
        name = model.weights.head.name
        plans[name] = replace(plans[name], tensors=(HEAD,))
    matrices, changed = {}, {name for adapter in adapters for name in adapter.matrices}
    for name, plan in plans.items():
        if here := changed.intersection(plan.tensors):
            changed -= here
            if why := _why_not_beside(plan, weights.get(name)):
                raise UnsupportedModelError(f"an adapter changes {min(here)}, which is one of {why}; {_MERGE_INSTEAD}")
            matrices[name] = _low_rank(model.device, config, plan, tensors, adapters, dtype)
    assert not changed, changed
    return DeviceAdapters(adapters, matrices)


def _why_only_merged(model: AdaptableModel) -> str | None:
    """Says why a model has no adapters beside its weights, or returns None."""
    if len(model.stages) > 1:
        return "a model on several devices"
    if model.config.bidirectional:
        return "an encoder"
    return "recurrent layers" if model.config.state_bytes else None


def _weights_by_name(weights: ModelWeights) -> dict[str, Weight]:
    names: dict[str, Weight] = {}
    for weight in weights.matrices:
        names[weight.name] = weight
    return names


def _why_not_beside(plan: MatrixPlan, weight: Weight | None) -> str | None:
    """Says what hinders products of adapters beside a weight's product, or returns None."""
    if plan.n_experts > 1:
        return "many experts"
    if weight is None or weight.rows != plan.rows:
        return "the matrices outside the layers"
    if plan.k % 16 or any(rows % TILE_ROWS for rows in plan.tensor_rows):
        return "the matrices with sizes that are no multiples of 16"
    return None


def _low_rank(
    device: Device,
    config: ModelConfig,
    plan: MatrixPlan,
    tensors: Mapping[str, TensorInfo],
    adapters: Sequence[Adapter],
    dtype: str,
) -> LowRankWeight:
    """Stacks the adapters' matrices of one weight. Layouts: kernels/portable/lora.cl."""
    columns, segments = _places(plan)
    a_rows, b_rows, owners = list[np.ndarray](), list[np.ndarray](), list[int]()
    table = np.zeros((len(adapters), 3), np.int32)
    for number, adapter in enumerate(adapters):
        ranks = [len(adapter.matrices[name].a) for name in plan.tensors if name in adapter.matrices]
        rank = -(-max(ranks, default=0) // ROWS_AT_ONCE) * ROWS_AT_ONCE
        table[number] = sum(map(len, a_rows)), sum(map(len, b_rows)), rank
        a = np.zeros((len(plan.tensors), rank, plan.k), np.float32)
        b = np.zeros((rank, plan.rows), np.float32)
        parts = zip(plan.tensors, plan.first_rows(), plan.tensor_rows, plan.runs_of_tensors, columns, strict=True)
        for i, (name, first, n_rows, runs, places) in enumerate(parts):
            if (low := adapter.matrices.get(name)) is None:
                continue
            rows = np.arange(first, first + n_rows) if runs is None else runs.rows(0, n_rows)
            of_part = low.b[rows]
            if i < plan.n_rotated:
                if name in tensors and tensors[name].rope_interleaved:
                    of_part = pairs_moved(of_part, config, apart=True)
                if config.rotary_dim is not None:
                    of_part = of_part[spread(np.arange(n_rows), config)]
            factor = _balance(low.a, of_part)
            a[i, : len(low.a)] = low.a * factor[:, np.newaxis]
            b[: len(low.a), places] = (of_part / factor).T
        a_rows.append(a.reshape(-1, plan.k))
        b_rows.append(b)
        owners += [number] * (len(plan.tensors) * rank // ROWS_AT_ONCE)

    def uploaded(values: np.ndarray) -> np.ndarray:
        return encode_floats(values, _FORMATS[dtype])

    a_all, b_all = np.concatenate(a_rows), np.concatenate(b_rows)
    return LowRankWeight(
        device.upload(uploaded(a_all), f"adapters of {plan.name}, A"),
        device.upload(uploaded(b_all), f"adapters of {plan.name}, B"),
        device.upload(np.array(owners, np.int32), "owners of rows of A"),
        device.upload(segments, "segments of columns of B"),
        device.upload(table, "rows of adapters"),
        dtype,
        plan.k,
        plan.rows,
        len(a_all),
        len(adapters),
    )


def _places(plan: MatrixPlan) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the columns of each tensor's rows in a product's result, and the tensor of each 16 columns."""
    columns, row = [], 0
    segments = np.zeros(plan.rows // TILE_ROWS, np.int32)
    for i, n_rows in enumerate(plan.tensor_rows):
        at = row + np.arange(n_rows)
        if plan.alternate:
            at = (at // TILE_ROWS * 2 + i % 2) * TILE_ROWS + at % TILE_ROWS
        row += 0 if plan.alternate and i % 2 == 0 else n_rows
        columns.append(at)
        segments[at[::TILE_ROWS] // TILE_ROWS] = i
    return columns, segments


def _balance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a power of two for each row of A. Multiplied by it, and B's column divided, both have similar sizes, so
    that 16-bit numbers hold them well.
    """
    sizes = np.abs(b).max(axis=0) / np.maximum(np.abs(a).max(axis=1), 1e-30)
    factor: np.ndarray = np.exp2(np.round(np.log2(np.clip(sizes, 1e-12, 1e12)) / 2)).astype(np.float32)
    return factor


class AdapterSet:
    """The adapters that a model's texts can choose. Models with other caches share it."""

    def __init__(self) -> None:
        self.loaded: dict[str, Adapter] = {}  # by name
        self.scales: dict[str, float] = {}  # of texts that choose nothing; others are not applied
        self.on_device: DeviceAdapters | None = None

    def load(
        self,
        model: AdaptableModel,
        tensors: Mapping[str, TensorInfo],
        adapter: Adapter,
        dtype: str,
        used: Iterable[Adapter] = (),
    ) -> None:
        """Adds an adapter, in place of an older one with its name. used: adapters of running texts, which stay on the
        device. Raises the errors of `put_on_device`, and then changes nothing.
        """
        if why := _why_only_merged(model):
            raise UnsupportedModelError(f"adapter {shown(adapter.name)} beside {why}; {_MERGE_INSTEAD}")
        loaded = self.loaded | {adapter.name: adapter}
        kept = [*loaded.values(), *(other for other in used if other not in loaded.values())]
        self.on_device = put_on_device(model, tensors, kept, dtype)
        self.loaded = loaded

    def unload(self, name: str) -> None:
        """Removes an adapter. Texts that use it go on, and its memory is free when the next adapter is loaded.

        Raises UsageError for an unknown name.
        """
        self.check(name)
        del self.loaded[name]
        self.scales.pop(name, None)

    def check(self, name: object) -> str:
        """Returns the name. Raises UsageError unless an adapter has it."""
        if not isinstance(name, str) or name not in self.loaded:
            raise UsageError(
                f"there is no adapter {shown(name)}; loaded are {', '.join(self.loaded) or 'none'} (--lora NAME=PATH)"
            )
        return name

    def choice(self, lora: str | Mapping[str, float] | None) -> AdapterChoice:
        """Returns a text's adapters: one by name, several with scales, or for None the set's own `scales`.

        Raises UsageError for an unknown name or a scale that is no number.
        """
        if isinstance(lora, str):
            lora = {lora: 1.0}
        scales = self.scales if lora is None else lora
        if not isinstance(scales, Mapping):
            raise UsageError(f"lora is {shown(lora)}; expected an adapter's name, or names with scales")
        pairs = [(self.loaded[self.check(name)], check_scale(scale)) for name, scale in scales.items()]
        return AdapterChoice(tuple(pair for pair in pairs if pair[1]))
