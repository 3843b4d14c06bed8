"""From a QAT run to a Hugging Face directory with packed experts, compared with the run before it gets its name.

The parent's tensors are walked one by one (run_units.py). A routed expert's weight is taken from the run, packed and written as the layout says
(layouts/); a tensor that the run trained is written in the parent's dtype; everything else is copied bit for bit, and so are tokenizer,
template and generation config. Shards are written one unit at a time (stream.py), read again and compared with what training computed with,
and the model that is read back predicts what the trained one did (verify.py). Only then does the directory get its name.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..archs import build_model, load_config
from ..plan import QuantPlan, make_plan
from .check import require_fitting_parent
from .disk import give_name, refuse_existing, require_free_space, resumable_directory
from .layouts import Content, find_layout
from .masters import Masters
from .metadata import METADATA
from .packed import PackedCheckpoint
from .reader import EMBEDDING, HEAD, CheckpointReader, sha256_of_weights
from .readers import reader_warnings
from .run import Run
from .run_units import RunUnits
from .stream import Shard, check_shards, dtype_counts, plan_shards, write_index, write_shards
from .verify import KLReport, measure_kl

CHAT_TEMPLATES = "additional_chat_templates"   # where transformers stores further templates
WAIT_S = 3600.0                                # for the shards of another rank without a new one among them


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written and what the comparison with the run found."""

    directory: Path
    layout: str
    expert_tensors: int          # tensors of the parent that were packed
    expert_weights: int          # weights compared with the run, all equal
    kept_tensors: int            # copied bit for bit
    rounded_tensors: int         # trained beside the experts, written in the parent's dtype
    bytes_before: int            # weight files of the parent
    bytes_after: int             # weight files of the export
    dtypes: dict[str, int]       # tensors by safetensors dtype
    kl: KLReport                 # of the model read back against the trained one
    warnings: tuple[str, ...]    # readers that do not take this mix of formats


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one of several ranks wrote."""

    rank: int
    shards: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How an export is done, beyond what it writes."""

    layout: str | None = None          # None: the family's own
    jobs: int = 1                      # threads
    rank: int = 0                      # of `ranks` processes that write one directory on one file system, each its own experts
    ranks: int = 1
    prompts: tuple[str, ...] = field(default=())   # texts for the KL; empty: the built-in ones

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"jobs: must be at least 1; got {self.jobs}.")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank: must lie in 0..ranks - 1; got rank {self.rank} of {self.ranks}.")


def export_run(run_dir: Path, out: Path, *, parent_dir: Path | None = None, options: ExportOptions | None = None) -> ExportResult | RankResult:
    """Write the trained weights of a run to `out`, re-read them and compare exactly; only then does `out` exist.

    parent_dir: where the parent lies now, when it has moved since the run. A rank other than 0 writes its shards and returns a RankResult.
    Errors: FileExistsError for an `out` that exists, ValueError for a parent that is not the run's, a layout that cannot hold the run, a damaged
        file or a difference found on re-reading, OSError for a full disk. Nothing is left behind in any case; a killed export is continued
        by the next with the same inputs.
    """
    options = options or ExportOptions()
    refuse_existing(out)
    run = Run.open(run_dir)
    parent = parent_dir or run.parent
    if not parent.is_dir():
        raise FileNotFoundError(f"{parent}: the parent that {run_dir} was made from is not there. Give its place now with --parent DIR.")
    reader = CheckpointReader(parent)
    if (found := sha256_of_weights(parent, jobs=options.jobs)) != run.parent_sha256:
        raise ValueError(f"{parent}: is not the parent of {run_dir}: weights hash to {found[:12]}, the run was made from {run.parent_sha256[:12]}. "
                         "Give the right one with --parent.")
    config = load_config(parent)
    plan = make_plan(config, scale_mode=run.scale_mode, where=str(parent), options=run.plan_options)
    require_fitting_parent(reader, config=config, plan=plan)
    masters = run.open_masters()
    if plan.options.experts == "bf16":
        raise ValueError(f"{run_dir}: is the control of a run: nothing is quantized in it, so there is nothing to pack. Export the QAT run.")
    if getattr(config, "tie_word_embeddings", False) and HEAD in masters:   # one tensor in memory, which a sharded run may call by its other name
        masters.rename(HEAD, EMBEDDING)
    _require_fitting_run(run, masters=masters, plan=plan, config=config)
    if getattr(config, "tie_word_embeddings", False) and EMBEDDING in masters and HEAD in reader:
        masters.alias(HEAD, EMBEDDING)   # a copy on disk
    layout = find_layout(options.layout or plan.arch.layout)
    source = RunUnits(reader, config=config, plan=plan, masters=masters, layout=layout, ranks=options.ranks)
    content = source.content()
    if (problem := layout.problem(content)) is not None:
        raise ValueError(f"export: layout {layout.name}: {problem}. Choose another with --layout.")
    shards = plan_shards(source.units())
    metadata = run.export_metadata(layout=layout.name, checkpoint_sha256=run.checkpoint_sha256(jobs=options.jobs))
    with resumable_directory(out, fingerprint=_fingerprint(shards, metadata=metadata), rank=options.rank, ranks=options.ranks) as partial:
        mine = [s for s in shards if s.owner == options.rank]
        present = sum(s.num_bytes for s in mine if s.is_complete(partial))
        require_free_space(out, num_bytes=sum(s.num_bytes for s in mine) - present + 2**20, what="export")
        write_shards(partial, mine, jobs=options.jobs, label="export")
        if options.rank != 0:
            return RankResult(rank=options.rank, shards=len(mine), num_bytes=sum(s.num_bytes for s in mine))
        _wait_for_shards(partial, shards)
        write_index(partial, shards)
        copy_rest(parent, partial)
        write_config(partial, parent=parent, layout=layout.name, content=content)
        (partial / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
        written = PackedCheckpoint(partial, arch=plan.arch)
        expert_weights = check_shards(written, shards, jobs=options.jobs, label="export")
        kl = measure_kl(partial, parent=parent, plan=plan, masters=masters, prompts=options.prompts)
        give_name(partial, out)
    others = [n for n in reader.names if not source.is_packed(n)]
    rounded = sum(source.is_trained(n) or source.planned(n) is not None for n in others)
    return ExportResult(directory=out, layout=layout.name, expert_tensors=len(reader.names) - len(others), expert_weights=expert_weights,
                        kept_tensors=len(others) - rounded, rounded_tensors=rounded, bytes_before=reader.num_bytes,
                        bytes_after=CheckpointReader(out).num_bytes, dtypes=dtype_counts(shards), kl=kl,
                        warnings=reader_warnings(content, layout=layout.name))


def _require_fitting_run(run: Run, *, masters: Masters, plan: QuantPlan, config: Any) -> None:
    """ValueError when the checkpoint lacks a tensor the run trained, or holds one the model does not have, or of another shape."""
    shapes = {n: tuple(p.shape) for n, p in build_model(config, device="meta").named_parameters()}
    wanted = set(shapes) if run.meta["quant"].get("trainable") == "all" else {w.name for w in plan.weights}
    where = f"{run.directory}: the checkpoint at step {run.step}"
    for name in sorted(wanted - set(masters)):
        raise ValueError(f"{where} holds no {name} (of {len(wanted - set(masters))} missing). It belongs to another model, or is damaged.")
    for name in sorted(set(masters) - set(shapes)):
        raise ValueError(f"{where} holds {name}, which {run.parent} does not have. It belongs to another model.")
    for name in masters:
        if masters.shape(name) != shapes[name]:
            raise ValueError(f"{where}: {name} has shape {masters.shape(name)}; the model asks for {shapes[name]}. It belongs to another model.")


def _fingerprint(shards: Sequence[Shard], *, metadata: dict[str, Any]) -> str:
    """What a directory is made of and what goes where in it: shards of another fingerprint are not taken over."""
    tensors = [(s.file, t.name, t.dtype, t.shape) for s in shards for u in s.units for t in u.tensors]
    return hashlib.sha256(json.dumps([tensors, metadata]).encode()).hexdigest()


def _wait_for_shards(directory: Path, shards: Sequence[Shard]) -> None:
    """Until the other ranks' shards are there. Errors: RuntimeError after WAIT_S without a new one."""
    left = len(shards) + 1
    while missing := [s for s in shards if not s.is_complete(directory)]:
        if len(missing) < left:
            left, since = len(missing), time.monotonic()
        if time.monotonic() - since > WAIT_S:
            raise RuntimeError(f"export: rank {missing[0].owner} has not written {missing[0].file} ({len(missing)} shards are missing). Start the ranks "
                               "that stopped again with the same command: what is written is kept.")
        time.sleep(0.2)


def copy_rest(source: Path, directory: Path) -> None:
    """Everything beside weights and config: tokenizer, templates, generation config."""
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".h5", ".gguf", ".msgpack", ".onnx") or path.name.endswith(".index.json")
        if path.is_file() and not path.name.startswith(".") and not is_weights and path.name not in ("config.json", METADATA):
            shutil.copyfile(path, directory / path.name)
    if (source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / CHAT_TEMPLATES, directory / CHAT_TEMPLATES, dirs_exist_ok=True)


def write_config(directory: Path, *, parent: Path, layout: str, content: Content) -> None:
    """config.json of the parent with what the layout says of the packed weights."""
    config = json.loads((parent / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(find_layout(layout).config_json(config, content), indent=2) + "\n")
