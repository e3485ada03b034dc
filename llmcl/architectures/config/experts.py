"""Reads each layer's expert settings from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families.blocks import ExpertSettings, Scores, Scoring
from llmcl.architectures.families.family import ExpertKeys, Family
from llmcl.errors import CheckpointError, shown

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # one key with several names

Experts = list[ExpertSettings | None]  # per layer; None: no experts


def experts_from_hf(read: Reader, family: Family, n_layers: int) -> Experts:
    """Reads the expert settings. Raises UnsupportedModelError for experts in a family without experts."""
    keys = family.experts
    key = next((key for key in _COUNTS if key in read.values and read.get(key) is not None), _COUNTS[0])
    if keys is None:
        if read.get(key, 0) not in (0, 1):
            refuse(key, read.get(key))
        return [None] * n_layers
    if keys.enabled is not None and not read.flag(keys.enabled, default=False):
        return [None] * n_layers
    if keys.optional and read.get(key, 0) == 0:
        return [None] * n_layers
    n_experts = read.size(key, limits.MAX_EXPERTS)
    size = read.size(keys.size, limits.MAX_INTERMEDIATE)
    shared = 0
    if keys.shared_size is not None:
        shared = read.size(keys.shared_size, limits.MAX_INTERMEDIATE, default=0, minimum=0)
    if keys.shared_count is not None:
        shared = size * read.size(keys.shared_count, limits.MAX_EXPERTS, default=0, minimum=0)
    settings = ExpertSettings(
        n_experts,
        read.size(keys.top_k, n_experts),
        size,
        keys.renormalize if isinstance(keys.renormalize, bool) else read.flag(keys.renormalize, default=True),
        shared,
        _scores_from_hf(read, keys, n_experts),
    )
    if family.single_blocks:
        dense = {i for i, kind in enumerate(read.get("layer_types")) if kind != "moe"}
    else:
        dense = _dense_layers(read, keys, n_layers)
    return _checked([None if i in dense else settings for i in range(n_layers)], read.source)


def hunyuan_keys(read: Reader) -> dict[str, int]:
    """Returns the numbers that Hunyuan's config.json lists for each layer. Raises UnsupportedModelError if layers
    differ.
    """
    keys = {}
    for key in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        numbers = read.get(key)
        if isinstance(numbers, list):
            if len({*map(str, numbers)}) != 1:
                unsupported(f"{key} that differs between layers ({shown(numbers)})")
            keys[key] = numbers[0]
    return keys


def _scores_from_hf(read: Reader, keys: ExpertKeys, n_experts: int) -> Scores | None:
    """Reads DeepSeek's keys. Groups apply if topk_method says so, and always with sigmoid scores."""
    if keys.scoring is None:
        return None
    n_groups = top_groups = 1
    if read.text("topk_method", default="noaux_tc") != "greedy":
        n_groups = read.size("n_group", n_experts, default=1)
        top_groups = read.size("topk_group", n_groups, default=1)
    scale = read.number("routed_scaling_factor", 0.0, limits.MAX_SCALE, default=1.0)
    corrected = keys.scoring == "sigmoid" if keys.corrected is None else keys.corrected
    if isinstance(corrected, str):
        corrected = read.flag(corrected, default=True)
    return _scores(keys.scoring, n_groups, top_groups, scale, corrected=corrected)


def _scores(scoring: Scoring, n_groups: int, top_groups: int, scale: float, *, corrected: bool) -> Scores | None:
    """Returns None if the router chooses by the largest logits and weights are unscaled."""
    if n_groups == top_groups:
        n_groups = top_groups = 1
    if scoring == "softmax" and n_groups == 1 and scale == 1.0 and not corrected:
        return None
    return Scores(scoring, n_groups, top_groups, scale, corrected)


def _dense_layers(read: Reader, keys: ExpertKeys, n_layers: int) -> set[int]:
    """Returns the layers without experts. Qwen: every decoder_sparse_step-th layer has experts, except mlp_only_layers.
    DeepSeek: the first layers are dense, or the layers that mlp_layer_types calls dense.
    """
    if keys.dense_layers is not None:
        if (types := read.get("mlp_layer_types")) is None:
            return {*range(read.size(keys.dense_layers, limits.MAX_LAYERS, default=0, minimum=0))}
        if not isinstance(types, list) or len(types) != n_layers or not {*types} <= {"dense", "sparse"}:
            read.fail("mlp_layer_types", types, f"'dense' or 'sparse' for each of {n_layers} layers")
        return {i for i, kind in enumerate(types) if kind == "dense"}
    step = read.size("decoder_sparse_step", limits.MAX_LAYERS, default=1)
    dense = read.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        read.fail("mlp_only_layers", dense, "a list of layers")
    return {*dense, *(i for i in range(n_layers) if (i + 1) % step)}


def experts_from_gguf(read: Reader, arch: str, family: Family, n_layers: int, tensor_names: Collection[str]) -> Experts:
    """Reads the expert settings. Raises UnsupportedModelError for experts in a family without experts."""
    keys, prefix = family.experts, f"{arch}.expert_"
    if keys is None:
        if (n_experts := read.size(f"{prefix}count", limits.MAX_EXPERTS, default=0, minimum=0)) > 1:
            refuse(f"{prefix}count", n_experts)
        return [None] * n_layers
    may_be_none = keys.optional or keys.enabled is not None
    if may_be_none and not read.size(f"{prefix}count", limits.MAX_EXPERTS, default=0, minimum=0):
        return [None] * n_layers
    n_experts = read.size(f"{prefix}count", limits.MAX_EXPERTS)
    of_mlp = 0  # with one block a layer it is a list
    if not family.single_blocks:
        of_mlp = read.size(f"{arch}.feed_forward_length", limits.MAX_INTERMEDIATE, default=0, minimum=0)
    size = read.size(f"{prefix}feed_forward_length", limits.MAX_INTERMEDIATE, default=of_mlp or None)
    shared = 0
    if keys.shared_size is not None:
        usual = of_mlp if keys.shared_size == "intermediate_size" else 0  # GGUF stores it as an MLP's size
        shared = read.size(f"{prefix}shared_feed_forward_length", limits.MAX_INTERMEDIATE, default=usual, minimum=0)
    if keys.shared_count is not None:
        shared = size * read.size(f"{prefix}shared_count", limits.MAX_EXPERTS, default=0, minimum=0)
    settings = ExpertSettings(
        n_experts,
        read.size(f"{prefix}used_count", n_experts),
        size,
        read.flag(f"{prefix}weights_norm", default=keys.gguf_renormalize),
        shared,
        _scores_from_gguf(read, prefix, keys, n_experts, tensor_names),
    )
    n_dense = 0
    if keys.dense_layers is not None:
        n_dense = read.size(f"{arch}.leading_dense_block_count", n_layers, default=0, minimum=0)
    return _checked([None if i < n_dense else settings for i in range(n_layers)], read.source)


def _scores_from_gguf(
    read: Reader, prefix: str, keys: ExpertKeys, n_experts: int, tensor_names: Collection[str]
) -> Scores | None:
    """Reads the router's scoring. Files without the key are DeepSeek-V2 (softmax), or GLM-4.7-Flash (sigmoid) if
    tensors include a choice bias.
    """
    if keys.scoring is None:
        return None
    corrected = any(name.endswith(".exp_probs_b.bias") for name in tensor_names)
    gating = read.size(f"{prefix}gating_func", 2, default=2 if corrected and keys.scoring == "sigmoid" else 1)
    n_groups = read.size(f"{prefix}group_count", n_experts, default=1)
    top_groups = read.size(f"{prefix}group_used_count", n_groups, default=1)
    scale = read.number(f"{prefix}weights_scale", 0.0, limits.MAX_SCALE, default=1.0)
    scoring: Scoring = "sigmoid" if gating == 2 else "softmax"
    corrected |= scoring == "sigmoid" and not isinstance(keys.corrected, str)
    return _scores(scoring, n_groups, top_groups, scale, corrected=corrected)


def refuse(key: str, n_experts: object) -> None:
    unsupported(f"mixture of experts in this architecture ({key} {shown(n_experts)})")


def _checked(experts: Experts, source: str) -> Experts:
    in_all = 0
    for settings in experts:
        if settings is None:
            continue
        in_all += settings.n_experts
        if (scores := settings.scores) is not None:
            reached = settings.n_experts // scores.n_groups * scores.top_groups
            if settings.n_experts % scores.n_groups or reached < settings.top_k:
                raise CheckpointError(
                    f"{source}: {settings.top_k} of {settings.n_experts} experts cannot be chosen from "
                    f"{scores.top_groups} of {scores.n_groups} groups. The checkpoint is damaged or not what it claims "
                    "to be; fetch or convert it again."
                )
        for name, size in (("expert", settings.size), ("shared expert", settings.shared_size)):
            if size % limits.SIZE_MULTIPLE:
                unsupported(f"an {name} of {size} rows", f"they must be a multiple of {limits.SIZE_MULTIPLE}")
    if in_all > limits.MAX_ALL_EXPERTS:
        raise CheckpointError(
            f"{source}: its layers have {in_all} experts together, expected at most {limits.MAX_ALL_EXPERTS}. The "
            "checkpoint is damaged or not what it claims to be; fetch or convert it again."
        )
    return experts
