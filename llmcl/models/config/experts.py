"""The experts of each layer, read from config.json or from GGUF metadata."""

from __future__ import annotations

from llmcl.errors import CheckpointError, shown
from llmcl.models.config import limits
from llmcl.models.config.reader import Reader, unsupported
from llmcl.models.families.blocks import ExpertSettings
from llmcl.models.families.family import Family

_COUNTS = ("num_experts", "num_local_experts")  # one key under two names; defaults have the second

Experts = list[ExpertSettings | None]  # of each layer, None for one without


def experts_from_hf(read: Reader, family: Family, n_layers: int) -> Experts:
    """Raises UnsupportedModelError for experts in a family that has none."""
    keys = family.experts
    key = next((key for key in _COUNTS if key in read.values and read.get(key) is not None), _COUNTS[0])
    if keys is None:
        if read.get(key, 0) not in (0, 1):
            refuse(key, read.get(key))
        return [None] * n_layers
    if keys.enabled is not None and not read.flag(keys.enabled, default=False):
        return [None] * n_layers
    n_experts = read.size(key, limits.MAX_EXPERTS)
    shared = 0
    if keys.shared_size is not None:
        shared = read.size(keys.shared_size, limits.MAX_INTERMEDIATE, default=0, minimum=0)
    settings = ExpertSettings(
        n_experts,
        read.size(keys.top_k, n_experts),
        read.size(keys.size, limits.MAX_INTERMEDIATE),
        keys.renormalize is None or read.flag(keys.renormalize, default=True),
        shared,
    )
    dense = _dense_layers(read, n_layers)
    return _checked([None if i in dense else settings for i in range(n_layers)], read.source)


def _dense_layers(read: Reader, n_layers: int) -> set[int]:
    """Qwen's: every decoder_sparse_step-th layer has experts, but for those of mlp_only_layers."""
    step = read.size("decoder_sparse_step", limits.MAX_LAYERS, default=1)
    dense = read.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        read.fail("mlp_only_layers", dense, "a list of layers")
    return {*dense, *(i for i in range(n_layers) if (i + 1) % step)}


def experts_from_gguf(read: Reader, arch: str, family: Family, n_layers: int) -> Experts:
    """Raises UnsupportedModelError for experts in a family that has none."""
    keys, prefix = family.experts, f"{arch}.expert_"
    if keys is None:
        if (n_experts := read.size(f"{prefix}count", limits.MAX_EXPERTS, default=0, minimum=0)) > 1:
            refuse(f"{prefix}count", n_experts)
        return [None] * n_layers
    if keys.enabled is not None and not read.size(f"{prefix}count", limits.MAX_EXPERTS, default=0, minimum=0):
        return [None] * n_layers
    n_experts = read.size(f"{prefix}count", limits.MAX_EXPERTS)
    size = read.size(f"{arch}.feed_forward_length", limits.MAX_INTERMEDIATE, default=0, minimum=0)
    shared = 0
    if keys.shared_size is not None:
        usual = size if keys.shared_size == "intermediate_size" else 0  # the format has it as that of an MLP
        shared = read.size(f"{prefix}shared_feed_forward_length", limits.MAX_INTERMEDIATE, default=usual, minimum=0)
    settings = ExpertSettings(
        n_experts,
        read.size(f"{prefix}used_count", n_experts),
        read.size(f"{prefix}feed_forward_length", limits.MAX_INTERMEDIATE, default=size or None),
        read.flag(f"{prefix}weights_norm", default=keys.gguf_renormalize),
        shared,
    )
    return _checked([settings] * n_layers, read.source)


def refuse(key: str, n_experts: object) -> None:
    unsupported(f"mixture of experts in this architecture ({key} {shown(n_experts)})")


def _checked(experts: Experts, source: str) -> Experts:
    in_all = 0
    for settings in experts:
        if settings is None:
            continue
        in_all += settings.n_experts
        for name, size in (("expert", settings.size), ("shared expert", settings.shared_size)):
            if size % limits.SIZE_MULTIPLE:
                unsupported(f"an {name} of {size} rows", f"they must be a multiple of {limits.SIZE_MULTIPLE}")
    if in_all > limits.MAX_ALL_EXPERTS:
        raise CheckpointError(
            f"{source}: its layers have {in_all} experts together, expected at most {limits.MAX_ALL_EXPERTS}. The "
            "checkpoint is damaged or not what it claims to be; fetch or convert it again."
        )
    return experts
