"""gpt-oss: transposed [E, in, out] with interleaved gate and up columns, fused on disk, biases beside them.

The export writes its own layout (`*_blocks`, `*_scales`), which transformers, vLLM and SGLang read for this family alone.
Source: transformers `integrations/mxfp4.py`, openai/gpt-oss `torch/weights.py`.
"""

from .base import MoEArch

ARCH = MoEArch(
    name="gpt_oss",
    model_types=("gpt_oss",),
    stored="fused",
    transposed=True,
    interleaved=True,
    not_experts=(r".*\.experts\.\w+_bias",),
    router=r".*\.mlp\.router\..*",
    layout="gpt-oss",
)
