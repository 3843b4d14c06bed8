"""Who cannot read a directory, and where its geometry does not suit an engine: said at export, conversion and inspection.

Sources: measured with transformers 5.24.0 and compressed-tensors 0.20.1; read in vLLM 0.33.0 and SGLang 0.5.23 (tests/goldens/engine_names.json).
"""

from collections.abc import Sequence

from .layouts import Content


def reader_warnings(content: Content, *, layout: str) -> tuple[str, ...]:
    """Each a sentence."""
    arch = content.arch
    if layout == "mimo":
        return ("transformers 5.24 does not read the mimo layout; vLLM 0.33 does for ten families (README), SGLang 0.5.23 for MiMo-V2, kilotok for all.",)
    if layout == "gpt-oss":
        return ()
    if arch.layout == "gpt-oss":
        return ("no engine is known to read gpt-oss's experts one by one: this layout of it is for kilotok and for conversion back.",)
    if arch.misread is not None:
        return (f"{arch.misread}. kilotok reads the directory right.",)
    packed: dict[str, set[str]] = {}
    for p in content.packed_experts:
        assert p.place is not None
        packed.setdefault(p.place.fused.rsplit(".", 1)[0], set()).add(p.format)
    for fused in content.kept_experts:
        packed.setdefault(fused.rsplit(".", 1)[0], set()).add("bf16")
    if all(formats == {"mxfp4"} for formats in packed.values()):
        return ()
    if any(len(formats) > 1 for formats in packed.values()):
        return ("one layer holds experts of two formats: transformers 5.24 loads such a directory WRONG (random weights, only a warning), and vLLM "
                "has one scheme a layer. Read it with kilotok alone, or keep whole layers.",)
    return ("some layers keep their experts at higher precision: transformers 5.24 with compressed-tensors refuses such a directory; kilotok reads it, "
            "and vLLM is told by `ignore` (bf16) or a group of their own (MXFP8), which was not run here.",)


def engine_notes(model_type: str, *, layout: str) -> tuple[str, ...]:
    """What engines were seen to do with the names of a layout, where that is not to load them."""
    if layout == "compressed-tensors" and model_type not in ("deepseek_v2", "deepseek_v3", "deepseek_v4", "kimi_k3"):
        return ("SGLang 0.5.23 takes MXFP4 experts by these names for DeepSeek and Kimi-K3 alone: for Qwen3-MoE, GLM-4 and MiniMax-M2 it LEAVES THEM ZERO "
                "and only logs it, for Mixtral, OLMoE, Qwen2-MoE and Ernie it stops. vLLM 0.33 takes them.",)
    return ()


def geometry_warnings(*, hidden: int, expert_hidden: int, ranks: Sequence[int] = (1, 2, 4, 8)) -> tuple[str, ...]:
    """What tensor parallelism does to MX blocks, and what engines pad.

    The input of down_proj is cut over the ranks, so each rank's share of the expert's hidden size must be whole MX blocks of 32; the Marlin path
    of vLLM pads the share to a multiple of 128 and the model's hidden size to one of 256, its other paths the share to 64.
    """
    said = []
    cut = [r for r in ranks if expert_hidden % r or expert_hidden // r % 32]
    if cut:
        said.append(f"{expert_hidden} hidden channels of an expert over {', '.join(map(str, cut))} ranks are not whole MX blocks of 32: "
                    "tensor parallelism of that size is refused or wrong; use expert parallelism")
    padded = [r for r in ranks if r not in cut and expert_hidden // r % 128]
    if padded:
        said.append(f"over {', '.join(map(str, padded))} rank(s) vLLM pads an expert's hidden channels from "
                    f"{', '.join(str(expert_hidden // r) for r in padded)} to a multiple of 128")
    if hidden % 256:
        said.append(f"vLLM's Marlin path pads the hidden size {hidden} to {-(-hidden // 256) * 256}")
    return tuple(said)
