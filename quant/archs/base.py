"""What the catalogue says of one family of models: where its experts are, and their names on disk."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertSlice:
    """Where one tensor of a checkpoint lies inside a fused in-memory weight."""

    fused: str         # in-memory parameter, [E, out, in]
    expert: int
    part: int          # which of the `parts` row groups of the fused weight
    parts: int


@dataclass(frozen=True, kw_only=True)
class MoEArch:
    """A family whose experts are fused in memory as [E, out, in] and stored one by one.

    In memory: `<experts>.<fused>` with the row groups of `fused[...]` concatenated along `out`.
    On disk:   `<experts>.<e>.<projection>.weight`, [out / parts, in].
    All other tensors have the same name in memory and on disk.
    """

    name: str
    model_types: tuple[str, ...]
    experts: str                          # regular expression of the module that owns the fused weights
    fused: dict[str, tuple[str, ...]]     # fused parameter -> projections on disk, in row order
    not_experts: tuple[str, ...]          # regular expressions of look-alikes, named in the plan as kept
    router: str = r".*\.mlp\.gate\..*"    # the tensors that pick experts

    def disk_names(self, fused_name: str, *, num_experts: int) -> list[list[str]]:
        """[expert][part] names on disk of one fused weight."""
        experts, leaf = fused_name.rsplit(".", 1)
        return [[f"{experts}.{e}.{p}.weight" for p in self.fused[leaf]] for e in range(num_experts)]

    def expert_slice(self, disk_name: str) -> ExpertSlice | None:
        """The place of a checkpoint tensor in its fused weight; None when it is not an expert's."""
        match = re.fullmatch(rf"(?P<experts>{self.experts})\.(?P<e>\d+)\.(?P<proj>\w+)\.weight", disk_name)
        if match is None:
            return None
        for leaf, projections in self.fused.items():
            if match["proj"] in projections:
                return ExpertSlice(fused=f"{match['experts']}.{leaf}", expert=int(match["e"]),
                                   part=projections.index(match["proj"]), parts=len(projections))
        return None
