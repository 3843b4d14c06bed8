"""Gluon device code run on a CPU, one program after the other: Triton has no interpreter for Gluon.

A module of device code is executed with stand-ins for `gluon`, `gl` and Hopper's operations, so its own text runs, on torch tensors and
with ordinary control flow. What that shows: indices, masks, which program does what, the order of sums of whole tensors, and that nothing is
read before it is there. It shows nothing of layouts, barriers, races or the hardware's own rounding inside a product.

Strict where a GPU would not be: an address outside its tensor is an error, shared memory starts as NaN, and an asynchronous copy makes its
target NaN when it is issued and fills it when it is waited for.
"""

import builtins
import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PACKAGE = "kilotok.kernels.persistent"


class _State(threading.local):
    """Of a thread: its program, its copies under way."""

    def __init__(self) -> None:
        self.program, self.groups, self.open = 0, list[Any](), list[Any]()


_state = _State()
_atomic = threading.Lock()


class Pointer:
    """Addresses in a flat tensor: an element offset, or a tensor of them."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        assert memory.is_contiguous()
        self.memory, self.offset = memory.view(-1), offset

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + (more.to(torch.int64) if isinstance(more, Tensor) else more))

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(offsets, mask), of one shape; offsets under the mask are checked."""
        offset, live = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask))
        outside = live & ((offset < 0) | (offset >= len(self.memory)))
        if bool(outside.any()):
            raise IndexError(f"address {int(offset[outside].flatten()[0])} of a tensor of {len(self.memory)} elements")
        return torch.where(live, offset, 0), live


class Shared:
    """Shared memory; views share it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, i: Any) -> "Shared":
        return Shared(self.values[int(i)])

    def load(self, _layout: Any) -> Tensor:
        return self.values.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.values.shape and value.dtype == self.values.dtype
        self.values.copy_(value)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.values.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        """The memory from here on."""
        assert dtype == self.values.dtype and self.values.is_contiguous()
        shape = [int(s) for s in shape]
        strides = torch.empty(shape, device="meta").stride()
        return _blocks(Shared(torch.as_strided(self.values, shape, strides)), layout)


class Blocks(Shared):
    """Rows that are wider than a swizzle: blocks of columns, one after the other."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks    # [block, row, column]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.blocks.transpose(0, 1).flatten(1)

    def store(self, value: Tensor) -> None:
        assert value.shape == self.values.shape and value.dtype == self.blocks.dtype
        self.blocks.copy_(value.view(value.shape[0], self.blocks.shape[0], -1).transpose(0, 1))


def _blocks(memory: Any, swizzle_bytes: int | None) -> Any:
    """A view of contiguous memory, as its layout has it."""
    if not swizzle_bytes:
        return memory
    values = memory.values
    width = swizzle_bytes // values.dtype.itemsize
    if values.dim() != 2 or width >= values.shape[1]:
        return memory
    return Blocks(torch.as_strided(values, (values.shape[1] // width, values.shape[0], width), (values.shape[0] * width, width, 1)))


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **_options: Any) -> Tensor:
    offset, live = pointer.at(mask)
    values = pointer.memory[offset]
    if mask is None:
        return values
    filler = other if other is not None else torch.nan if values.is_floating_point() else -(2**30)
    return torch.where(live, values, torch.as_tensor(filler).to(values.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset, live = pointer.at(mask)
    value, _ = torch.broadcast_tensors(torch.as_tensor(value).to(pointer.memory.dtype), offset)
    addresses = offset[live]
    assert len(addresses.unique()) == addresses.numel(), "two lanes store to one address"
    pointer.memory[addresses] = value[live]


def _atomic_add(pointer: Pointer, value: int, **_options: Any) -> Tensor:
    offset, _ = pointer.at(None)
    with _atomic:
        before = pointer.memory[offset].clone()
        pointer.memory[offset] += value
    return before


def _copy(target: Shared, pointer: Pointer, mask: Any = None) -> None:
    target.store(torch.full_like(target.values, torch.nan))
    _state.open.append((target, pointer, mask))


def _commit() -> None:
    _state.groups.append(_state.open)
    _state.open = []


def _wait(outstanding: int) -> None:
    while len(_state.groups) > outstanding:
        for target, pointer, mask in _state.groups.pop(0):
            target.store(_load(pointer, mask, 0.0))


def _mma(a: Shared, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    # Products of float64 rounded to fp32: what a row gives does not depend on its place, as on the GPU.
    product = a.values.double() @ b.values.double()
    return (acc.double() + product if use_acc else product).float()


def assembly(ptx: str, _constraints: str, operands: list[Any], **_options: Any) -> Any:
    if ptx == "mov.b32 $0, 0;":
        return 0
    if "prefetch.global.L2" in ptx:
        pointer, line, lines = operands
        pointer.at(line < lines)
        return line * 0
    if ptx.startswith("cvt.rn.bf16x2.f32"):
        return operands[0].bfloat16()
    assert ptx.startswith("ex2.approx.ftz"), ptx
    return torch.exp2(operands[0])


def _jit(fn: Any = None, **_options: Any) -> Any:
    return fn if fn is not None else _jit


def _elementwise(fn: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: fn(torch.as_tensor(x))


def _reduction(fn: Callable[..., Tensor]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, axis: fn(x, dim=axis).to(x.dtype)


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    kinds = [x.dtype for x in (a, b) if isinstance(x, Tensor)]
    a, b = (torch.as_tensor(x, dtype=kinds[0] if kinds else None) for x in (a, b))
    return torch.where(torch.as_tensor(condition), a, b)


def _scan(x: Tensor, axis: int, _combine: Any) -> Tensor:
    return x.cumsum(axis).to(x.dtype)   # the only combination in use is a sum


def _two(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: fn(torch.as_tensor(a), torch.as_tensor(b))


LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x, int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
    program_id=lambda _axis: _state.program, arange=lambda a, b, _layout=None: torch.arange(a, b, dtype=torch.int32),
    full=lambda shape, value, dtype, _layout=None: torch.full(tuple(shape), value, dtype=dtype),
    zeros=lambda shape, dtype, _layout=None: torch.zeros(tuple(shape), dtype=dtype), load=_load, store=_store, atomic_add=_atomic_add,
    where=_where, minimum=_two(torch.minimum), maximum=_two(torch.maximum), sum=_reduction(torch.sum), max=_reduction(torch.amax), min=_reduction(torch.amin),
    exp2=_elementwise(torch.exp2), rsqrt=_elementwise(torch.rsqrt), fma=lambda a, b, c: a * b + c, associative_scan=_scan,
    convert_layout=lambda x, _layout: x, inline_asm_elementwise=assembly, expand_dims=torch.unsqueeze, to_tensor=lambda x: x,
    reshape=lambda x, s: x.reshape(tuple(s)), broadcast=torch.broadcast_tensors, static_range=range, static_assert=lambda *_: None,
    allocate_shared_memory=lambda dtype, shape, _layout: Shared(torch.full(tuple(shape), torch.nan if dtype.is_floating_point else -(2**30), dtype=dtype)),
    **{name: lambda *_, **__: None for name in ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout")},
    NVMMASharedLayout=lambda *, swizzle_byte_width, **_: swizzle_byte_width)
HOPPER = SimpleNamespace(async_copy=SimpleNamespace(async_copy_global_to_shared=_copy, commit_group=_commit, wait_group=_wait),
                         fence_async_shared=lambda: None, mbarrier=None, warpgroup_mma=_mma,
                         warpgroup_mma_wait=lambda _outstanding, deps: deps[0])
_FAKES: dict[str, Any] = {"triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=_jit, constexpr_function=_jit)),
                          "triton.experimental.gluon": SimpleNamespace(language=LANGUAGE),
                          "triton.experimental.gluon.language.nvidia.hopper": HOPPER}
_loaded: dict[str, ModuleType] = {}


def on_cpu(name: str) -> ModuleType:
    """The module `name` of kernels/persistent with device code that runs here."""
    if name not in _loaded:
        spec = importlib.util.find_spec(f"{_PACKAGE}.{name}")
        assert spec is not None and spec.origin is not None
        module = ModuleType(f"on_cpu_{name}")

        def imported(what: str, env: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
            if what in _FAKES:
                return _FAKES[what]
            if (level, what) == (2, "moe.stream"):
                return SimpleNamespace(cta_barrier=lambda: None, here=lambda x: x, hidden=lambda x: x, row_major=lambda _rank: None, store_tagged=None)
            if level == 1:
                return on_cpu(what)
            return builtins.__import__(what, env, local, names, level)

        vars(module).update(__package__=_PACKAGE, __builtins__={**vars(builtins), "__import__": imported})
        sys.modules[module.__name__] = module   # dataclasses look it up
        exec(compile(Path(spec.origin).read_text(), spec.origin, "exec"), vars(module))
        _loaded[name] = module
    return _loaded[name]


_TO = torch.Tensor.to


def _to(tensor: Any, dtype: Any = None, *more: Any, bitcast: bool = False, **options: Any) -> Any:
    return tensor.contiguous().view(dtype) if bitcast else _TO(tensor, dtype, *more, **options)


@contextmanager
def bitcasts() -> Iterator[None]:
    """Tensor.to with Triton's bitcast."""
    torch.Tensor.to = _to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.to = _TO  # type: ignore[method-assign]


def launch(kernel: Callable[..., None], programs: int, *arguments: Any, seed: int = 0, **constants: Any) -> None:
    """Every program of a grid, in a random order."""
    with bitcasts():
        for _state.program in random.Random(seed).sample(range(programs), programs):
            _state.groups, _state.open = [], []
            kernel(*(Pointer(a) if isinstance(a, Tensor) else a for a in arguments), **constants)
