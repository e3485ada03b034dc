"""The whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.blocks import (
    Attention,
    Block,
    Experts,
    Factor,
    GatedMlp,
    LayerInput,
    OwnNorms,
    Rotation,
    layer_name,
)
from llmcl.architectures.families.latent import KEYS, VALUES, LatentAttention
from llmcl.architectures.families.normalize import WEIGHTS, Normalize
from llmcl.architectures.families.parallel import MLP, Center, ParallelAttention
from llmcl.architectures.families.plain_mlp import CURVE, PlainMlp
from llmcl.architectures.families.recurrent import DeltaNet, Mamba, ShortConv
from llmcl.reference.arrays import Array, wide
from llmcl.reference.experts import choose_experts, choose_scored_experts, experts_down, experts_gate_up, scale_shares
from llmcl.reference.latent import latent_append
from llmcl.reference.layers import (
    center_rows,
    embed,
    gate_inputs,
    geglu,
    layer_inputs,
    linear,
    rms_norm,
    rope,
    rope_table,
    scale_rows,
    soft_cap,
    squared_relu,
    swiglu,
    xielu,
)
from llmcl.reference.online_softmax import attention
from llmcl.reference.recurrent import (
    delta_inputs,
    delta_rule,
    gated_norm,
    mamba_inputs,
    mamba_scan,
    short_conv,
    sigmoid_gate,
)
from llmcl.reference.storage import round_to

if TYPE_CHECKING:
    from llmcl.architectures.config import ModelConfig


def forward(
    config: ModelConfig,
    weights: Mapping[str, Array],
    token_ids: Sequence[int] | Array,
    dtype: DTypeLike = np.float64,
    kv_dtype: str | None = None,
) -> Array:
    """Returns logits for every position: weights by Hugging Face names, token_ids int [n] -> dtype [n, vocab].

    dtype: storage dtype for op results (each op computes in float64 regardless). kv_dtype: storage type of keys and
    values in the cache ("float32", "float16", "bfloat16", "q8_0"; None: unchanged), to measure the error from a reduced
    cache. For reduced weights, apply round_to() before.
    """

    def stored(x: Array) -> Array:
        return x.astype(dtype)

    def cached(x: Array) -> Array:
        return x if kv_dtype is None else round_to(x, kv_dtype)

    def norm(x: Array, name: str, eps: float | None = None) -> Array:
        eps = config.rms_norm_eps if eps is None else eps
        return stored(rms_norm(x, wide(weights[f"{name}.weight"]) + config.norm_offset, eps))

    def biased(x: Array, name: str) -> Array:
        """Multiplies by the named module (`_proj` left out) and adds its bias, if any."""
        module = name if f"{name}.weight" in weights else f"{name}_proj"
        y = linear(x, weights[f"{module}.weight"])
        return y + wide(weights[f"{module}.bias"]) if f"{module}.bias" in weights else y

    def project(x: Array, name: str) -> Array:
        return stored(biased(x, name))

    n = len(token_ids)
    interleaved = FAMILIES[config.architecture].interleaves_rope
    kept: dict[str, tuple[Array, Array]] = {}  # keys and values, by layer name
    rotations = {name: rope_table(np.arange(n), *table) for name, table in config.rotations(n).items()}

    def rotate(x: Array, rotation: Rotation) -> Array:
        rotary_dim = config.rotary_dim or x.shape[-1]
        cos, sin = (table[:, : rotary_dim // 2] for table in rotations[rotation])
        if interleaved:  # the scores are the same if queries and keys are reordered alike
            x = np.concatenate([x[..., :rotary_dim:2], x[..., 1:rotary_dim:2], x[..., rotary_dim:]], axis=-1)
        return stored(np.concatenate([rope(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]], axis=-1))

    def scaled(block: Attention, q: Array) -> Array:
        """Multiplies queries [n, heads, size] by the factor of their position."""
        if block.query_scale is None:
            return q
        turns = (np.arange(n) + block.query_scale.offset) // block.query_scale.length
        return q * (1.0 + block.query_scale.beta * np.log1p(turns))[:, None, None]

    def attend(block: Attention, layer: str, x: Array) -> Array:
        heads = block.heads_in(config)
        if block.fused:
            ends = np.cumsum([config.n_q_heads, heads.n_kv])
            q, *keys_values = np.split(project(x, layer + "self_attn.qkv").reshape(n, -1, heads.size), ends, axis=1)
        else:
            names = "q" if block.keys_of is not None else "qkk" if block.keys_as_values else "qkv"
            q, *keys_values = (project(x, f"{layer}self_attn.{name}").reshape(n, -1, heads.size) for name in names)
        gate = q[:, 1::2] if block.gated else None
        if block.gate_module is not None:
            gate = project(x, layer + block.gate_module).reshape(q.shape)
        q = q[:, ::2] if block.gated else q
        if block.row_norms:
            q = norm(q.reshape(n, -1), layer + "self_attn.q_norm").reshape(q.shape)
        if block.head_norms and not block.norms_after_rotation:
            q = norm(q, layer + "self_attn.q_norm")
        q = rotate(q, block.rotation)
        if block.head_norms and block.norms_after_rotation:
            q = norm(q, layer + "self_attn.q_norm")
        q = stored(scaled(block, q))
        if block.keys_of is None:
            kept[layer] = keys_and_values(block, layer, *keys_values)
        k, v = kept[layer if block.keys_of is None else layer_name(block.keys_of, "")]
        scale, window, cap = config.attention_scale, block.window, block.soft_cap
        sinks = weights[layer + "self_attn.sinks"] if block.sinks else None
        x = attention(q, k, v, 0, scale, window=window, chunk=block.chunk, cap=cap, sinks=sinks)
        x = stored(x if gate is None else sigmoid_gate(x, gate))
        return biased(x.reshape(n, -1), layer + "self_attn.o")

    def keys_and_values(block: Attention, layer: str, k: Array, v: Array) -> tuple[Array, Array]:
        """Returns keys and values as stored in the cache."""
        if block.row_norms:
            k = norm(k.reshape(n, -1), layer + "self_attn.k_norm").reshape(k.shape)
        if block.head_norms and not block.norms_after_rotation:
            k = norm(k, layer + "self_attn.k_norm")
        if block.value_norms:
            v = stored(rms_norm(v, np.ones(v.shape[-1]), config.rms_norm_eps))
        k = rotate(k, block.rotation)
        if block.head_norms and block.norms_after_rotation:
            k = norm(k, layer + "self_attn.k_norm")
        return cached(k), cached(v)

    def attend_latents(block: LatentAttention, layer: str, x: Array) -> Array:
        """Computes each head's keys and values explicitly; the device instead projects queries into the
        latent space."""
        settings, heads, prefix = block.settings, config.n_q_heads, layer + "self_attn."
        low = norm(project(x, prefix + "q_a"), prefix + "q_a_layernorm") if settings.query_rank else x
        queries = project(low, prefix + ("q_b" if settings.query_rank else "q")).reshape(n, heads, settings.query)
        latents = project(x, prefix + "kv_a_proj_with_mqa")
        cos, sin = (table[:, : settings.rope // 2] for table in rotations[block.rotation])
        given = latents, wide(weights[prefix + "kv_a_layernorm.weight"]), queries, cos, sin, config.rms_norm_eps
        rows, queries = latent_append(*given, interleaved=settings.interleaved)
        rows, queries = cached(stored(rows)), stored(scaled(block, queries))
        of_keys = wide(weights[layer + KEYS]).reshape(heads, settings.rank, settings.nope)
        of_values = wide(weights[layer + VALUES]).reshape(heads, settings.value, settings.rank)
        keys = np.zeros((n, heads, max(settings.query, settings.value)))
        values, q = np.zeros_like(keys), np.zeros_like(keys)
        keys[..., : settings.nope] = np.einsum("nr,hrk->nhk", wide(rows[:, : settings.rank]), of_keys)
        keys[..., settings.nope : settings.query] = rows[:, None, settings.rank :]
        values[..., : settings.value] = np.einsum("nr,hvr->nhv", wide(rows[:, : settings.rank]), of_values)
        q[..., : settings.query] = queries
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        x = stored(attention(q, keys, values, 0, scale)[..., : settings.value])
        return biased(x.reshape(n, -1), prefix + "o")

    def gated_mlp(block: GatedMlp, layer: str, x: Array) -> Array:
        if block.fused:
            gate, up = np.split(project(x, layer + "mlp.gate_up"), 2, axis=1)
        else:
            gate, up = (project(x, f"{layer}mlp.{name}") for name in ("gate", "up"))
        gated = {"silu": swiglu, "gelu_tanh": geglu}[block.activation](gate, up)
        return biased(stored(gated), layer + "mlp.down")

    def plain_mlp(block: PlainMlp, layer: str, x: Array) -> Array:
        up = project(x, layer + "mlp.up")
        if not block.curved:
            return linear(stored(squared_relu(up)), weights[layer + "mlp.down_proj.weight"])
        alpha_p, alpha_n, beta, eps = (float(np.ravel(weights[layer + name])[0]) for name in CURVE)
        activated = xielu(up, np.logaddexp(0.0, alpha_p), np.logaddexp(0.0, alpha_n), beta, eps)
        return linear(stored(activated), weights[layer + "mlp.down_proj.weight"])

    def attend_beside(block: ParallelAttention, layer: str, x: Array) -> Array:
        return attend(block, layer, x) + gated_mlp(MLP, layer, x)

    def mixture(block: Experts, layer: str, x: Array) -> Array:
        ids, shares = choose(block, layer, x)
        if block.scaled_inputs:
            y = chosen(block, layer, stored(x * shares), ids, np.ones_like(shares))
        else:
            y = chosen(block, layer, x, ids, shares)
        return y + shared(block, layer, x) if block.settings.shared_size else y

    def mixture_with_own_norms(block: Experts, norms: OwnNorms, layer: str, hidden: Array) -> Array:
        router_norm = wide(weights[layer + norms.router]) * config.hidden_size**-0.5
        assert block.norm is not None
        of_chosen = choose(block, layer, stored(rms_norm(hidden, router_norm, config.rms_norm_eps)))
        y = chosen(block, layer, norm(hidden, layer + block.norm), *of_chosen)
        beside = shared(block, layer, norm(hidden, layer + norms.shared))
        return norm(stored(y), layer + norms.after_chosen) + norm(stored(beside), layer + norms.after_shared)

    def choose(block: Experts, layer: str, x: Array) -> tuple[Array, Array]:
        """Returns each token's experts and shares."""
        settings = block.settings
        logits = stored(linear(x, weights[f"{layer}{block.router}.weight"]))
        router_bias = weights[f"{layer}{block.router}.bias"] if block.bias else None
        if settings.scores is not None:
            return choose_scored_experts(
                logits,
                settings.top_k,
                renormalize=settings.renormalize,
                sigmoid=settings.scores.scoring == "sigmoid",
                n_groups=settings.scores.n_groups,
                top_groups=settings.scores.top_groups,
                per_group=settings.scores.per_group,
                scale=settings.scores.scale,
                correction=weights[layer + block.correction] if settings.scores.corrected else None,
            )
        ids, shares = choose_experts(logits, settings.top_k, renormalize=settings.renormalize, bias=router_bias)
        return ids, shares if block.scales is None else scale_shares(shares, ids, weights[layer + block.scales])

    def chosen(block: Experts, layer: str, x: Array, ids: Array, shares: Array) -> Array:
        def experts(module: str, kind: str = "weight") -> Array:
            return np.stack([weights[f"{layer}{module.format(i)}.{kind}"] for i in range(block.settings.n_experts)])

        gate_up_bias = down_bias = None
        if block.bias:
            gate_up_bias = np.stack([experts(module, "bias") for module in block.first_modules], axis=1)
            down_bias = experts(block.down, "bias")
        kind = {"silu": "swiglu", "gelu_tanh": "geglu"}.get(block.activation, block.activation)
        rows = stored(experts_gate_up(x, experts(block.first_modules[0]), experts(block.up), ids, kind, gate_up_bias))
        return experts_down(rows, experts(block.down), ids, stored(shares), down_bias)

    def shared(block: Experts, layer: str, x: Array) -> Array:
        up = project(x, f"{layer}{block.shared}.up")
        if block.gate is None:
            return linear(stored(squared_relu(up)), weights[f"{layer}{block.shared}.down_proj.weight"])
        rows = stored(
            {"silu": swiglu, "gelu_tanh": geglu}[block.activation](project(x, f"{layer}{block.shared}.gate"), up)
        )
        if block.has_shared_gate:
            rows = stored(sigmoid_gate(rows, linear(x, weights[f"{layer}{block.shared_gate}.weight"])))
        return linear(rows, weights[f"{layer}{block.shared}.down_proj.weight"])

    def convolve(block: ShortConv, layer: str, x: Array) -> Array:
        rows = stored(biased(x, layer + "conv.in")).reshape(n, 3, -1)
        taps = wide(weights[layer + "conv.conv.weight"]).T
        y, _ = short_conv(rows, taps, np.zeros_like(taps[1:]), weights.get(layer + "conv.conv.bias"))
        return biased(stored(y), layer + "conv.out")

    def mixer_inputs(block: DeltaNet | Mamba, layer: str, prefix: str, x: Array) -> tuple[Array, Array, Array]:
        """Returns the projected rows, the convolution's taps and the heads' decays."""
        plan = block.matrices(config)["projection"]
        parts = zip(plan.tensors, plan.tensor_rows, plan.runs_of_tensors, strict=True)
        inputs = (weights[layer + name][slice(None) if runs is None else runs.rows(0, n)] for name, n, runs in parts)
        rows = stored(np.concatenate([linear(x, values) for values in inputs], axis=1))
        is_log = block.settings.log_decays
        decays = -np.exp(wide(weights[prefix + "A_log"])) if is_log else wide(weights[prefix + "A"])
        return rows, wide(weights[prefix + "conv1d.weight"]).T, decays

    def delta_net(block: DeltaNet, layer: str, x: Array) -> Array:
        settings, prefix = block.settings, layer + "linear_attn."
        rows, taps, decays = mixer_inputs(block, layer, prefix, x)
        scalars = np.stack([decays, wide(weights[prefix + "dt_bias"])])
        qkv, gates, _ = delta_inputs(rows, taps, scalars, np.zeros_like(taps[1:]), n_k=settings.n_k, d_k=settings.d_k)
        state = np.zeros((settings.n_v, settings.d_k, settings.d_v))
        y, _ = delta_rule(stored(qkv), stored(gates), state, n_k=settings.n_k, heads_in_turn=settings.in_turn)
        z = rows[:, settings.channels : settings.channels + settings.n_v * settings.d_v].reshape(y.shape)
        y = gated_norm(stored(y), weights[prefix + "norm.weight"], z, config.rms_norm_eps)
        return linear(stored(y).reshape(n, -1), weights[prefix + "out_proj.weight"])

    def mamba(block: Mamba, layer: str, x: Array) -> Array:
        settings, prefix = block.settings, layer + "mamba."
        rows, taps, decays = mixer_inputs(block, layer, prefix, x)
        scalars = np.stack([decays, wide(weights[prefix + "dt_bias"]), wide(weights[prefix + "D"])])
        bias, limits = weights.get(prefix + "conv1d.bias"), (settings.least_step, settings.most_step)
        xbc, gates, _ = mamba_inputs(rows, taps, scalars, np.zeros_like(taps[1:]), bias, limits)
        state = np.zeros((settings.n_heads, settings.d_state, settings.d_head))
        y, _ = mamba_scan(stored(xbc), stored(gates), scalars[2], state, n_groups=settings.n_groups)
        z = rows[:, settings.channels : -settings.n_heads].reshape(n, settings.n_groups, -1)
        norm_weight = wide(weights[prefix + "norm.weight"]).reshape(settings.n_groups, -1)
        y = gated_norm(stored(y).reshape(z.shape), norm_weight, z, config.rms_norm_eps, gate_first=True)
        return linear(stored(y).reshape(n, -1), weights[prefix + "out_proj.weight"])

    compute: dict[type[Block], Any] = {
        Attention: attend,
        LatentAttention: attend_latents,
        ParallelAttention: attend_beside,
        PlainMlp: plain_mlp,
        GatedMlp: gated_mlp,
        Experts: mixture,
        ShortConv: convolve,
        DeltaNet: delta_net,
        Mamba: mamba,
    }

    def given_to_layers(x: Array) -> Array:
        """Computes [n, layers, size] from embeddings x."""
        shape = n, config.n_layers, config.layer_input_size
        of_model = stored(linear(x, weights["model.per_layer_model_projection.weight"]) * config.hidden_size**-0.5)
        embedded = wide(weights["model.embed_tokens_per_layer.weight"])[np.asarray(token_ids)].reshape(shape)
        of_norm = weights["model.per_layer_projection_norm.weight"], embedded, config.rms_norm_eps
        return stored(layer_inputs(of_model.reshape(shape), *of_norm))

    def take_input(block: LayerInput, layer: str, x: Array, given: Array) -> Array:
        kind = {"silu": "swiglu", "gelu_tanh": "geglu"}[block.activation]
        gate = stored(linear(x, weights[layer + "per_layer_input_gate.weight"]))
        return linear(stored(gate_inputs(gate, given, kind)), weights[layer + "per_layer_projection.weight"])

    def plus(hidden: Array, block: Block, i: int) -> Array:
        """Returns the residual stream after a block in layer i."""
        layer = layer_name(i, "")
        if isinstance(block, Factor):
            return scale_rows(hidden, weights[layer + block.tensor])
        if isinstance(block, Center):
            return center_rows(hidden)
        if isinstance(block, Normalize):
            return rms_norm(hidden, weights[layer + WEIGHTS], config.rms_norm_eps)
        if isinstance(block, LayerInput):
            x = take_input(block, layer, hidden, given[:, i])
        elif isinstance(block, Experts) and block.own_norms is not None:
            x = mixture_with_own_norms(block, block.own_norms, layer, hidden)
        else:
            x = hidden if block.norm is None else norm(hidden, layer + block.norm)
            x = compute[type(block)](block, layer, x)
        if block.post_norm is not None:
            x = norm(stored(x), layer + block.post_norm, config.post_norm_eps)
        return hidden + x * config.residual_scale

    hidden = stored(embed(weights["model.embed_tokens.weight"], token_ids) * config.embedding_scale)
    given = given_to_layers(hidden) if config.layer_input_size else np.zeros((n, config.n_layers, 0))
    for i, blocks in enumerate(config.layers):
        for block in blocks:
            hidden = stored(plus(hidden, block, i))

    hidden = norm(hidden, "model.norm")
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    logits = linear(hidden, weights[head]) * config.logit_scale
    return stored(logits if config.logit_soft_cap is None else soft_cap(logits, config.logit_soft_cap))
