"""ModelConfig: the sizes and constants of a model."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from llmcl.architectures.config.limits import MAX_INTERMEDIATE, SIZE_MULTIPLE
from llmcl.architectures.config.reader import unsupported
from llmcl.architectures.config.rope import RopeScaling
from llmcl.architectures.config.rope_values import rotation, rotation_by_length
from llmcl.architectures.families.blocks import Attention, Heads, Layer, MatrixPlan, Rotation, layer_name
from llmcl.architectures.families.encoder import EncoderSettings
from llmcl.architectures.families.latent import LatentAttention, LatentSettings
from llmcl.architectures.families.recurrent import RecurrentBlock
from llmcl.errors import CheckpointError

FINAL_NORM = "model.norm.weight"
LAYER_INPUT_NORM = "model.per_layer_projection_norm.weight"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder. `config_from_hf` and `config_from_gguf` check every field.

    Fields with defaults do not exist in Llama.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: tuple[Layer, ...]  # blocks per layer, declared by the family (`families/blocks.py`)
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # trained context length in tokens
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    dtype: str  # stored type: "float32", "float16", "bfloat16" or "quantized"
    bos_token_id: int | None  # within the vocabulary
    eos_token_ids: tuple[int, ...]  # within the vocabulary
    norm_offset: float = 0.0  # see `families.Family`
    embedding_scale: float = 1.0  # factor on embeddings
    residual_scale: float = 1.0  # factor on block outputs
    attention_scale: float | None = None  # factor on scores; None: 1/sqrt(head_dim)
    logit_scale: float = 1.0  # factor on logits
    logit_soft_cap: float | None = None  # c in c tanh(logit / c)
    post_norm_eps: float | None = None  # eps of norms after blocks; None: rms_norm_eps
    rotary_dim: int | None = None  # leading head dimensions that rotate; None: all
    rope_axes: tuple[int, ...] = ()  # per rotated pair, the axis of its position: time, row, column; (): one axis
    local_rope_theta: float | None = None  # theta for rotation "local", never scaled; None: no such layers
    layer_input_size: int = 0  # size of the per-layer token input, a sum of an embedding and a projection; 0: none
    bidirectional: bool = False  # tokens see the whole text, so the model makes embeddings and no text
    encoder: EncoderSettings | None = None  # None: no learned positions, and a final norm

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    # The device holds the residual stream as x / residual_scale. Then block outputs are added unscaled, and every norm
    # of x gives the same result with a different eps.
    @property
    def stream_scale(self) -> float:
        """Returns the factor on embeddings on the device."""
        return self.embedding_scale / self.residual_scale

    @property
    def stream_eps(self) -> float:
        """Returns eps for norms that read the residual stream on the device."""
        return self.rms_norm_eps / self.residual_scale**2

    def rotations(self, max_context: int | None = None) -> dict[Rotation, np.ndarray]:
        """Returns tables for texts up to max_context tokens (None: the trained length), each float32 [2, rotated_size /
        2]: frequencies in radians per position, and factors on cosines and sines.
        """
        max_context = max_context or self.max_position
        main, local, none = self.rotated_size("main"), self.rotated_size("local"), self.rotated_size("none")
        tables: dict[Rotation, np.ndarray] = {
            "main": rotation(main, self.rotary_dim or main, self.rope_theta, self.rope_scaling, max_context),
            "none": np.repeat(np.array([[0.0], [1.0]], np.float32), none // 2, axis=1),
        }
        if self.local_rope_theta is not None:
            tables["local"] = rotation(local, self.rotary_dim or local, self.local_rope_theta, None, max_context)
        return tables

    def device_rotations(self, max_context: int) -> dict[Rotation, np.ndarray]:
        """Returns `rotations` for the device. With `rope_by_length`, "main" is `rotation_by_length`."""
        tables = self.rotations(max_context)
        if (scaling := self.rope_by_length) is not None:
            main = self.rotated_size("main")
            tables["main"] = rotation_by_length(main, self.rotary_dim or main, self.rope_theta, scaling)
        return tables

    @property
    def rope_by_length(self) -> RopeScaling | None:
        """Returns the rotary scaling if its frequencies depend on the text's length.

        In models with recurrent layers they depend on the context: snapshots of states are shared by texts of all
        lengths.
        """
        scaling = self.rope_scaling
        depends = scaling is not None and scaling.kind in ("longrope", "dynamic")
        return scaling if depends and not self.state_bytes else None

    def text_length(self, n_tokens: int, n_prompt: int | None = None) -> int:
        """Returns the length that chooses the rotary frequencies of a text of n_tokens, equal for texts with the same
        ones; 0 up to the original length.

        n_prompt: the tokens before the answer; None: all. "dynamic" chooses by the prompt's length, and raises theta
        further with each token beyond, as transformers does with a cache.
        """
        scaling = self.rope_by_length
        if scaling is None:
            return 0
        original = scaling.original_max_position
        if scaling.kind == "longrope":
            return original + 1 if n_tokens > original else 0
        length = n_tokens if n_prompt is None else n_prompt
        return length if length > original else 0

    def why_not_for_short_texts(self, max_context: int) -> str | None:
        """Explains why the context size changes rotary frequencies for short texts compared with transformers. None: no
        change.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind not in ("longrope", "dynamic") or self.rope_by_length is not None:
            return None
        if max_context <= scaling.original_max_position:
            return None
        short = scaling.original_max_position
        return (
            f"the rotary frequencies ({scaling.kind}) depend on the length, and the context of {max_context} tokens "
            f"chooses them for all texts. For texts up to {short} tokens, as the model was trained, set it to {short} "
            f"(-c {short}, max_context={short})"
        )

    def rotated_size(self, rotation: Rotation) -> int:
        """Returns the size of the heads with this rotation."""
        attends = (self.attention(i) for i in self.attention_layers)
        sizes = (block.heads_in(self).size for block in attends if block.rotation == rotation)
        return next(sizes, self.head_dim)

    def inv_freq(self) -> np.ndarray:
        """Returns the rotary frequencies for the trained length in radians per position, float32 [head_dim / 2]."""
        frequencies: np.ndarray = self.rotations()["main"][0]
        return frequencies

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Returns the layers with attention."""
        return tuple(i for i, blocks in enumerate(self.layers) if any(isinstance(block, Attention) for block in blocks))

    def keys_of(self, layer: int) -> int:
        """Returns the layer whose keys and values an attention layer reads."""
        other = self.attention(layer).keys_of
        return layer if other is None else other

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Returns the layers with their own keys and values in the cache."""
        return tuple(i for i in self.attention_layers if self.keys_of(i) == i)

    @property
    def keeps_early(self) -> bool:
        """Returns whether blocks after the last cached layer need more per token than the residual stream."""
        return len(self.cached_layers) < len(self.attention_layers) or self.layer_input_size > 0

    def attention(self, layer: int) -> Attention:
        """Returns the attention block of an attention layer."""
        return next(block for block in self.layers[layer] if isinstance(block, Attention))

    def heads(self, layer: int) -> Heads:
        """Returns the key and value heads of an attention layer."""
        return self.attention(layer).heads_in(self)

    @property
    def kinds_of_heads(self) -> list[Heads]:
        """Returns the distinct head kinds, in layer order."""
        kinds = [*dict.fromkeys(map(self.heads, self.attention_layers))]
        return kinds or [Heads(self.n_kv_heads, self.head_dim)]

    @property
    def qkv_values(self) -> int:
        """Returns the largest number of query, key and value elements per token over all layers."""
        return max((self.n_q_heads + 2 * heads.n_kv) * heads.size for heads in self.kinds_of_heads)

    @property
    def query_values(self) -> int:
        """Returns the largest number of query elements per token over all layers."""
        return self.n_q_heads * max(heads.size for heads in self.kinds_of_heads)

    @property
    def latent(self) -> LatentSettings | None:
        """Returns the sizes of latent attention, used in all layers. None: heads have separate keys and values."""
        block = self.attention(self.attention_layers[0]) if self.attention_layers else None
        return block.settings if isinstance(block, LatentAttention) else None

    def states(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Returns the float32 state arrays per sequence in a layer, or {} without a state."""
        blocks = (block for block in self.layers[layer] if isinstance(block, RecurrentBlock))
        return {name: shape for block in blocks for name, shape in block.states(self).items()}

    @property
    def state_bytes(self) -> int:
        """Returns the state bytes per sequence over all recurrent layers, or 0."""
        return self.state_bytes_in(range(self.n_layers))

    def state_bytes_in(self, layers: range) -> int:
        """Returns the state bytes per sequence in these layers, or 0."""
        return 4 * sum(prod(shape) for i in layers for shape in self.states(i).values())

    @property
    def has_windows(self) -> bool:
        """Returns whether any layer's attention has a window."""
        return any(self.attention(i).window is not None for i in self.attention_layers)

    @property
    def has_biases(self) -> bool:
        """Returns whether any projection adds a bias."""
        return any(name.endswith(".bias") for name in self.tensors())

    def top_matrices(self) -> dict[str, MatrixPlan]:
        """Returns the matrices outside the layers: the embedding, and the output head if separate."""
        names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
        if self.tie_embeddings:
            del names["head"]
        rows = (self.vocab_size,)
        plans = {what: MatrixPlan(what, self.hidden_size, (name,), rows) for what, name in names.items()}
        if values := self.layer_input_size * self.n_layers:
            embedding, projection = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"
            plans["layer_embedding"] = MatrixPlan("embedding of the layers", values, (embedding,), rows)
            plans["layer_projection"] = MatrixPlan(
                "projection for the layers", self.hidden_size, (projection,), (values,)
            )
        return plans

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns Hugging Face name and shape of every tensor in the model, in order of use."""
        top = {what: {plan.tensors[0]: (plan.rows, plan.k)} for what, plan in self.top_matrices().items()}
        head = top.pop("head", {})
        shapes: dict[str, tuple[int, ...]] = {name: shape for group in top.values() for name, shape in group.items()}
        if self.layer_input_size:
            shapes[LAYER_INPUT_NORM] = (self.layer_input_size,)
        if self.encoder is not None:
            shapes |= self.encoder.tensors(self.hidden_size)
        for i, blocks in enumerate(self.layers):
            for block in blocks:
                shapes |= {layer_name(i, name): shape for name, shape in block.tensors(self).items()}
        if self.encoder is None:
            shapes[FINAL_NORM] = (self.hidden_size,)
        return shapes | head

    def unused_tensors(self) -> set[str]:
        """Returns tensors in checkpoints that nothing reads: keys and values in layers that share another layer's."""
        names = *(f"{name}_proj.weight" for name in "kv"), *(f"{name}_norm.weight" for name in "kv")
        others = (i for i in self.attention_layers if self.keys_of(i) != i)
        return {layer_name(i, f"self_attn.{name}") for i in others for name in names}

    def n_parameters(self) -> int:
        """Returns the number of weights, embeddings included. Tied embeddings count once."""
        return sum(map(prod, self.tensors().values()))


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """Refuses sizes that are inconsistent, or that the kernels cannot handle."""
    for name in ("hidden_size", "intermediate_size"):
        if (value := getattr(config, name)) % SIZE_MULTIPLE:
            unsupported(f"{name} {value}", f"it must be a multiple of {SIZE_MULTIPLE}")
    rotated = {(config.attention(i).rotation, config.heads(i).size) for i in config.attention_layers}
    if len(rotated) > len({rotation for rotation, _ in rotated}):
        unsupported("heads of different sizes in layers with the same rotation")
    for i in config.attention_layers:
        owner = config.keys_of(i)
        if owner not in config.cached_layers or owner > i or config.heads(owner) != config.heads(i):
            raise CheckpointError(
                f"{source}: layer {i} is to read the keys of layer {owner}, which does not have such keys. The "
                "checkpoint is damaged or not what it claims to be; fetch or convert it again."
            )
    for heads in dict.fromkeys([Heads(config.n_kv_heads, config.head_dim), *config.kinds_of_heads]):
        if config.n_q_heads % heads.n_kv:
            raise CheckpointError(
                f"{source}: {config.n_q_heads} attention heads cannot share {heads.n_kv} key/value heads "
                "evenly. The checkpoint is damaged or not what it claims to be; fetch or convert it again."
            )
        if heads.size % SIZE_MULTIPLE:
            unsupported(f"head_dim {heads.size}", f"it must be a multiple of {SIZE_MULTIPLE}")
        # Together with the individual limits it keeps every byte count far below 2**63.
        if config.n_q_heads * heads.size > MAX_INTERMEDIATE:
            unsupported(
                f"{config.n_q_heads} heads of {heads.size}",
                f"their product must be at most {MAX_INTERMEDIATE}",
            )
    return config
