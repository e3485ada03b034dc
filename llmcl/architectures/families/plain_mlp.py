"""An MLP without a gate."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.families.blocks import Block, MatrixPlan, Shapes, Sizes

CURVE = tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))


@dataclass(frozen=True)
class PlainMlp(Block):
    """down(xielu(up(x))), with a learned curve per layer (Huang and Schlag, "Deriving Activation Functions Using
    Integration", 2024), or down(max(up(x), 0)^2).
    """

    norm: str | None = "post_attention_layernorm"
    curved: bool = True  # xIELU; False: max(x, 0)^2

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, ffn = sizes.hidden_size, sizes.intermediate_size
        return {
            "up": MatrixPlan("up", hidden, ("mlp.up_proj.weight",), (ffn,)),
            "down": MatrixPlan("down", ffn, ("mlp.down_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        return super().vectors(sizes) | {"curve": dict.fromkeys(CURVE, (1,)) if self.curved else {}}
