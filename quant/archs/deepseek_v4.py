"""DeepSeek-V4: `ffn` and w1 (gate), w3 (up), w2 (down) on disk, `mlp.experts` in memory; the release leaves out the leading `model.`."""

from .base import MoEArch

ARCH = MoEArch(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    fused={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    renamed=(".mlp.", ".ffn."),
    shared=r".*\.mlp\.shared_experts\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight",   # in memory and, for packed ones, on disk
    released=((r"^layers\.", "model.layers."), (r"^embed\.", "model.embed_tokens."), (r"^norm\.", "model.norm."), (r"^hc_head_", "model.hc_head.hc_")),
)
