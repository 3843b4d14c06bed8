"""The whole step kernel on a CPU: every program with its two consumers and two producers as threads, in real control flow.

The device code's own text runs, as in gluon_on_cpu.py, and here also what that leaves out: the ring and its barriers, the signals between consumers and
producers, barriers over the grid, the tensor cores' fragments, and shared memory as bytes, so that views of one area overlap as they do on the GPU. A wait
that nobody can end is an error that says who waits for what, however slow the machine is. It shows nothing of layouts, of races between threads of one
consumer, or of visibility.
"""

import builtins
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_on_cpu as base
import tagged_on_cpu
import torch
from gluon_on_cpu import LANGUAGE, Pointer
from thread_waits import Stuck, waits
from torch import Tensor

_DEVICE_MODULES = ("moe.stream", "moe.device", "moe.rolled", *(f"persistent.{name}" for name in (
    "tagged", "dense_device", "rolled_dense", "merge_device", "attention_rows", "attention_device", "plan", "router", "sample_device",
    "step_dense", "step_phases", "step_consumer", "step_device", "draft_phases", "draft_choose", "draft_dense", "draft_consumer", "draft_device")))
_here = base._state


class Word(int):
    """A number that is known when it is used, as a loop's; `.to` leaves it."""

    def to(self, *_to: Any, **_options: Any) -> "Word":
        return self

    def __floordiv__(self, other: Any) -> "Word":
        return Word(int(self) // other)

    def __add__(self, other: Any) -> Any:
        return Word(int(self) + other) if isinstance(other, int) else int(self) + other


def _range(*bounds: Any) -> Any:
    return map(Word, builtins.range(*(int(b) for b in bounds)))


class Barrier:
    """An mbarrier: its phase is complete when all arrivals and all announced bytes are there."""

    def __init__(self) -> None:
        self.condition, self.count, self.left, self.bytes, self.completed = threading.Condition(), 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def change(self, *, arrivals: int = 0, expected: int = 0, copied: int = 0) -> None:
        with self.condition:
            assert self.left >= arrivals, "more arrivals than the barrier counts"
            self.left -= arrivals
            self.bytes += expected - copied
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.completed += 1
                self.condition.notify_all()

    def wait(self, parity: Any) -> None:
        with self.condition:
            waits.wait(self.condition, lambda: self.completed & 1 != int(parity), f"{self.completed} phases are complete; waits for parity {int(parity)}")


class Grid:
    """A barrier over all consumers of all programs."""

    def __init__(self, members: int) -> None:
        self.condition, self.members, self.arrived, self.passed = threading.Condition(), members, 0, 0

    def arrive(self) -> int:
        with self.condition:
            turn, self.arrived = self.passed, self.arrived + 1
            if self.arrived == self.members:
                self.arrived, self.passed = 0, turn + 1
                self.condition.notify_all()
            return turn

    def wait(self, turn: int) -> None:
        with self.condition:
            waits.wait(self.condition, lambda: self.passed != turn, f"barrier {turn} over the grid, where {self.arrived} of {self.members} are")


class Barriers:
    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Memory:
    """Shared memory: a typed view of bytes."""

    def __init__(self, data: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.data, self.start, self.dtype, self.shape = data, start, dtype, tuple(int(s) for s in shape)

    @property
    def values(self) -> Tensor:
        number = 1
        for s in self.shape:
            number *= s
        end = self.start + number * self.dtype.itemsize
        assert end <= len(self.data), f"a view of {self.shape} {self.dtype} at byte {self.start} ends outside its {len(self.data)} bytes"
        return self.data[self.start:end].view(self.dtype).view(self.shape)

    def index(self, i: Any) -> "Memory":
        inner = self.shape[1:]
        size = self.dtype.itemsize
        for s in inner:
            size *= s
        assert 0 <= int(i) < self.shape[0], f"index {int(i)} of {self.shape}"
        return Memory(self.data, self.start + int(i) * size, self.dtype, inner)

    def _reinterpret(self, dtype: torch.dtype, shape: Any, layout: Any) -> Any:
        memory = Memory(self.data, self.start, dtype, tuple(shape))
        return base._blocks(memory, layout) if len(memory.shape) == 2 else memory

    def load(self, _layout: Any) -> Tensor:
        return self.values.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.shape and value.dtype == self.dtype, f"{value.dtype} {tuple(value.shape)} into {self.dtype} {self.shape}"
        self.values.copy_(value)

    def permute(self, order: tuple[int, ...]) -> Any:
        return base.Shared(self.values.permute(order))


def _allocate(dtype: torch.dtype, shape: Any, _layout: Any) -> Any:
    number = 1
    for s in shape:
        number *= int(s)
    if dtype == torch.int64:
        return Barriers(number) if len(shape) == 2 else Barriers(number).index(0)
    return Memory(torch.full((number * dtype.itemsize,), 255, dtype=torch.uint8), 0, dtype, tuple(shape))


def _copy_box(desc: Any, at: list[Any], barrier: Barrier, target: Memory) -> None:
    rows, first = target.shape[0], int(at[0])
    assert first >= 0 and first + rows <= len(desc), f"rows {first} to {first + rows} of {len(desc)}"
    target.values.copy_(desc[first:first + rows])
    barrier.change(copied=rows * desc.shape[1] * 4)


# --- the tensor core's fragments ---


def _pairs(words: Tensor) -> Tensor:
    """int32 [...] to the two bf16 of each, [..., 2], in float64."""
    return words.contiguous().view(torch.bfloat16).view(*words.shape, 2).double()


def _columns(words: Tensor) -> Tensor:
    """B fragments [W, g, t, 4] of a block of 32 to [W, column g, 32]."""
    return _pairs(words).flatten(3).reshape(words.shape[0], 8, 32)


def _block(first: Tensor, second: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """`_BLOCK_PTX` of dense_device.py."""
    w = first.shape[0]
    a = torch.stack([_pairs(first), _pairs(second)], 3).view(w, 8, 4, 2, 2, 2, 2)     # g, t, q, pair of columns, half, column
    rows = a.permute(0, 5, 1, 2, 3, 4, 6).reshape(w, 16, 32)
    return sums + _fragment(rows @ _columns(x).mT)


def _fragment(product: Tensor) -> Tensor:
    """[W, 16 rows, 8 columns] to sums [W, g, t, 4]: (row g, g + 8) x (column 2t, 2t + 1)."""
    w = product.shape[0]
    return product.view(w, 2, 8, 4, 2).permute(0, 2, 3, 1, 4).reshape(w, 8, 4, 4).float()


_SIGN, _MAGNITUDE = (15, 12, 14, 13), (6, 3, 0, 9)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _expert_step(word: int) -> Callable[..., Tensor]:
    def run(codes: Tensor, scales: Tensor, x_even: Tensor, x_odd: Tensor, sums: Tensor) -> Tensor:
        w = codes.shape[0]
        scale = scales[..., 0, word].long() & 0xFFFFFFFF                              # [W, g]: rotated right by one
        straight = ((scale << 1) | (scale >> 31)) & 0xFFFFFFFF
        factors = [2.0 ** (((straight >> s) & 255).double() - 127) * ((straight >> s) & 255 != 0) for s in (24, 16, 8, 0)]   # row g, g + 8; block 0, 1
        for block, x in enumerate((x_even, x_odd)):
            parts = []
            for half in range(2):
                bits = codes[..., 2 * block + half].long() & 0xFFFFFFFF               # [W, g, t]
                halves = torch.stack([bits & 0xFFFF, bits >> 16], -1)                 # the lower has the even column
                registers = [(1 - 2 * ((halves >> s) & 1)) * _E2M1[(halves >> m) & 7] for s, m in zip(_SIGN, _MAGNITUDE, strict=True)]
                parts.append(torch.stack([torch.stack([registers[0], registers[2]], 3), torch.stack([registers[1], registers[3]], 3)], 1))
            rows = torch.stack(parts, 4).reshape(w, 16, 32)                           # W, (half, g), t, q, pair of columns, column
            product = (rows @ _columns(x).mT * 2.0**-126).view(w, 2, 8, 8)
            factor = torch.stack([factors[2 * block], factors[2 * block + 1]], 1)
            sums = sums + _fragment((product * factor[..., None]).reshape(w, 16, 8))
        return sums.float()
    return run


# --- inline assembly ---


def _prescale(pairs: Tensor, _factor: Tensor) -> Tensor:
    return (_pairs(pairs) * 2.0**100).bfloat16().view(torch.int32).view(pairs.shape)


def _store_release(lane: Tensor, pointer: Pointer, value: Tensor) -> Tensor:
    base._store(pointer, value, mask=lane == 0)
    return lane


def _assembly(modules: dict[str, ModuleType]) -> Callable[..., Any]:
    stream, dense, device = (vars(modules[name]) for name in ("moe.stream", "persistent.dense_device", "moe.device"))
    known: dict[str, Callable[..., Any]] = {dense["_BLOCK_PTX"]: _block, device["_SIGMOID_PTX"]: lambda x: torch.sigmoid(x.double()).float(),
             **{stream[f"_STEP_{i}"]: _expert_step(i) for i in range(4)}}

    def run(ptx: str, _constraints: str, operands: list[Any], **_options: Any) -> Any:
        if ptx in known:
            return known[ptx](*operands)
        if ptx.startswith(("ex2.", "cvt.rn.bf16x2")) or "prefetch.global.L2" in ptx or ptx == "mov.b32 $0, 0;":
            return base.assembly(ptx, _constraints, operands)
        if ptx == "mov.b32 $0, $1;" or "%nctaid.x" in ptx:
            return operands[0]
        if "%ctaid.x" in ptx:
            return operands[0] + _here.program
        if tagged_on_cpu.loads(ptx):
            return tagged_on_cpu.load(ptx, operands, waits.poll)
        if tagged_on_cpu.loads_spans(ptx):
            return tagged_on_cpu.load_spans(ptx, operands, waits.poll)
        if "st.relaxed.gpu.global.b64" in ptx:
            return tagged_on_cpu.store(*operands)
        if ptx.startswith("mul.bf16x2"):
            return _prescale(*operands)
        if ptx.startswith("ld.relaxed.sys"):
            return base._load(operands[0])
        assert "st.release.sys" in ptx, ptx
        return _store_release(*operands)

    return run


def _join(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], -1)


class Kernel:
    """The device modules with stand-ins, and a grid of them to run, or of its programs those that are `present`: the others are not waited for.

    consumers: of a program.
    cheap, language, mbarrier, copy: what replaces functions of the modules (by module and name), of Gluon, of its barriers, and the copy of a TMA box, where
    only control flow is of interest.
    """

    def __init__(self, programs: int, *, consumers: int = 2, present: Sequence[int] | None = None, cheap: dict[str, dict[str, Any]] | None = None,
                 language: dict[str, Any] | None = None,
                 mbarrier: dict[str, Any] | None = None, copy: Callable[..., None] | None = None) -> None:
        self.present = range(programs) if present is None else present
        self.modules, self.errors = dict[str, ModuleType](), list[BaseException]()
        self.grid = Grid(consumers * len(self.present))
        names = {**vars(LANGUAGE)} | {
            "float64": torch.float64, "uint32": torch.int64, "to_tensor": lambda x: Word(x) if isinstance(x, int) else x, "barrier": lambda: None,
            "full_like": lambda x, v: torch.full_like(x, v), "zeros_like": torch.zeros_like, "reshape": lambda x, s: x.reshape(tuple(s)),
            "permute": lambda x, order: x.permute(tuple(order)), "join": _join, "split": lambda x: (x[..., 0], x[..., 1]), "expand_dims": torch.unsqueeze,
            "div_rn": torch.div, "allocate_shared_memory": _allocate, "warp_specialize": self._specialize, "static_range": _range,
            "inline_asm_elementwise": lambda *a, **o: self._asm(*a, **o), "DistributedLinearLayout": lambda **_: None, "SwizzledSharedLayout": lambda *_: None,
            "static_assert": lambda *_: None, "where": base._where, "shared_memory_descriptor": Memory}
        gl = SimpleNamespace(**names | (language or {}))
        barriers: dict[str, Any] = dict(MBarrierLayout=lambda: None, init=lambda b, count: b.init(count), arrive=lambda b, count: b.change(arrivals=count),
                                   wait=lambda b, parity: b.wait(parity), expect=lambda b, size: b.change(arrivals=1, expected=int(size)))
        hopper = SimpleNamespace(**vars(base.HOPPER) | {"mbarrier": SimpleNamespace(**barriers | (mbarrier or {})),
                                                          "tma": SimpleNamespace(async_copy_global_to_shared=copy or _copy_box)})
        self._fakes = {"triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=base._jit, constexpr_function=base._jit)),
                       "triton.experimental.gluon": SimpleNamespace(language=gl), "triton.experimental.gluon.language.nvidia.hopper": hopper}
        for name in _DEVICE_MODULES:
            self._load(name, cheap or {})
        self._asm: Callable[..., Any] = _assembly(self.modules)

    def _load(self, name: str, cheap: dict[str, dict[str, Any]]) -> ModuleType:
        if name in self.modules:
            return self.modules[name]
        spec = importlib.util.find_spec(f"kilotok.kernels.{name}")
        assert spec is not None and spec.origin is not None
        package = f"kilotok.kernels.{name.split('.')[0]}"
        module = ModuleType(f"step_on_cpu_{name}")

        def imported(what: str, env: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
            if what in self._fakes:
                return self._fakes[what]
            full = {1: f"{package.split('.')[-1]}.{what}", 2: what}.get(level, "")
            if full == "persistent.barrier":
                return SimpleNamespace(arrive=lambda *_: self.grid.arrive(), wait_arrived=lambda _barrier, _fault, _polls, turn, _warps: self.grid.wait(turn),
                                       step_barrier=lambda *_: self.grid.wait(self.grid.arrive()))
            if full in _DEVICE_MODULES:
                return self._load(full, cheap)
            return builtins.__import__(what, env, local, names, level)

        vars(module).update(__package__=package, __builtins__={**vars(builtins), "__import__": imported, "range": _range})
        sys.modules[module.__name__] = module
        exec(compile(Path(spec.origin).read_text(), spec.origin, "exec"), vars(module))
        if name == "persistent.dense_device":
            vars(module).update(chunk=lambda *_: None)     # a layout, of a dtype that torch's does not know
        vars(module).update(cheap.get(name, {}))
        self.modules[name] = module
        return module

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        waits.failed.set()

    def _specialize(self, functions: list[tuple[Any, tuple[Any, ...]]], _warps: Any, _registers: Any) -> None:
        program = _here.program

        def run(function: Any, arguments: tuple[Any, ...]) -> None:
            _here.program, _here.groups, _here.open = program, [], []
            try:
                function(*arguments)
            except BaseException as error:
                self._fail(error)
            finally:
                waits.add(-1)

        waits.add(len(functions) - 1)    # these instead of this one, which only waits for them
        threads = [threading.Thread(target=run, args=f, name=f"{f[0].__name__} {f[1][-1]}", daemon=True) for f in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        waits.add(1)

    def launch(self, descriptors: tuple[Tensor, ...], pointers: Any, *numbers: int, code: Any, draft: tuple[Any, Any] | None = None) -> None:
        """`step_kernel` by every program at once; with the draft's pointers and code `round_kernel`. descriptors: tensors as TMA sees them."""
        module, name = ("step_device", "step_kernel") if draft is None else ("draft_device", "round_kernel")
        kernel = vars(self.modules[f"persistent.{module}"])[name]
        waits.begin(len(self.present))
        p = [type(group)(*(Pointer(t) for t in group)) for group in (pointers, *(() if draft is None else draft[:1]))]
        codes = (code, *(() if draft is None else draft[1:]))
        Pointer.to = lambda self, *_a, **_o: self  # type: ignore[attr-defined]
        Pointer.__radd__ = Pointer.__add__  # type: ignore[attr-defined]
        Pointer.dtype = property(lambda self: SimpleNamespace(element_ty=self.memory.dtype))  # type: ignore[attr-defined]

        def run(program: int) -> None:
            _here.program = program
            try:
                kernel(*descriptors, *p, *map(Word, numbers), *codes)
            except BaseException as error:
                self._fail(error)
            finally:
                waits.add(-1)

        with base.bitcasts():
            threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in self.present]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.errors:
            real = [e for e in self.errors if not isinstance(e, Stuck)] or self.errors
            raise real[0]
