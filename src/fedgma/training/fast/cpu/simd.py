"""Tiles of vectors for numba: the few register-level steps that the CPU layers are made of.

Arrays end in an axis of `SLOTS` samples, so one vector holds one value of sixteen samples: each sample has a slot. A
*tile* is a tuple of such vectors, `rows x positions`, that stays in registers while a loop adds products to it. Vectors
are LLVM's, so the same code becomes AVX-512, AVX2 or NEON; only the size of a tile depends on the number of registers.

Rows and positions are given as tuples: the compiler knows their length and unrolls the tile.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from numba.extending import models, register_model

# numba has few annotations and llvmlite none: both are taken as untyped
numba: Any = import_module("numba")
types: Any = numba.types
cgutils: Any = import_module("numba.core.cgutils")
ir: Any = import_module("llvmlite.ir")

Function = TypeVar("Function", bound=Callable[..., Any])

SLOTS = 16  # samples in a vector: one AVX-512 register, two of AVX2, four of NEON
_F32, _I32 = ir.FloatType(), ir.IntType(32)


def has_wide_registers() -> bool:
    """Whether the processor that numba compiles for has 32 registers of 16 floats (AVX-512)."""
    if numba.config.CPU_FEATURES is not None:
        return "+avx512f" in numba.config.CPU_FEATURES.split(",")
    features = import_module("llvmlite.binding").get_host_cpu_features()
    return bool(features.get("avx512f", False))


WIDE = has_wide_registers()
ONE = (0,)
# positions computed together, as offsets in floats: neighbours in memory are SLOTS apart
POSITIONS = (0, SLOTS) if WIDE else ONE
STRIDE = len(POSITIONS)
WIDTH = SLOTS if WIDE else SLOTS // 2  # floats in a vector of a weight gradient's tile
WHOLE, PART = (0,) * SLOTS, (0,) * WIDTH  # tuples whose lengths tell the compiler the size of a vector

# without "nnan" and "ninf": a client that diverges must show it
_OPTIONS = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz", "arcp"}, "error_model": "numpy"}


def compiled(function: Function) -> Function:
    """The function compiled by numba, for other compiled functions to call; sums may be reordered."""
    # without a Python entry point it is compiled once, inside its caller, and not separately as well
    return cast(Function, numba.njit(**_OPTIONS, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def inlined(function: Function) -> Function:
    """As `compiled`, but written into its one caller: it is not compiled by itself as well."""
    return cast(Function, numba.njit(**_OPTIONS, inline="always")(function))


def both(function: Function) -> Function:
    """A function for Python and for compiled code."""
    return cast(Function, numba.extending.register_jitable(function))


def source_files() -> list[Path]:
    """The files that the CPU kernels are compiled from."""
    return sorted(Path(__file__).parent.glob("*.py"))


def sources_number() -> int:
    """A checksum of the sources of all CPU kernels."""
    return zlib.crc32(b"".join(path.read_bytes() for path in source_files()))


def compiled_to_disk(make: Callable[[int], Function]) -> Function:
    """The function that `make` returns, compiled once per machine: later processes read it from numba's cache.

    numba checks only the file that a function is in. So `make` gets a checksum of all the kernels' sources and its
    function refers to it: the checksum is then part of the cache's key, and an edit of any kernel compiles it again.
    """
    function = make(sources_number())
    try:
        return cast(Function, numba.njit(**_OPTIONS, cache=True)(function))
    except RuntimeError:  # no folder to write to: compile in every process
        return cast(Function, numba.njit(**_OPTIONS)(function))


def intrinsic(build: Callable[..., Any]) -> Callable[..., Any]:
    """A step written in LLVM instructions, callable from compiled code (without the first argument)."""
    return cast(Callable[..., Any], numba.extending.intrinsic(build))


class Vector(types.Type):  # type: ignore[misc]
    """The numba type of one vector of floats."""

    def __init__(self, count: int) -> None:
        super().__init__(name=f"Vector({count})")
        self.count = count


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, _vector(kind.count))  # type: ignore[no-untyped-call]


def _vector(count: int) -> Any:
    return ir.VectorType(_F32, count)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _load(context: Any, builder: Any, kind: Any, array: Any, index: Any, count: int) -> Any:
    address = _address(context, builder, kind, array, index)
    return builder.load(builder.bitcast(address, _vector(count).as_pointer()), align=4)


def _store(context: Any, builder: Any, kind: Any, array: Any, index: Any, value: Any, align: int = 4) -> None:
    address = _address(context, builder, kind, array, index)
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=align)


def _splat(builder: Any, scalar: Any, count: int) -> Any:
    undefined = ir.Constant(_vector(count), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def _constant(value: float, count: int) -> Any:
    return ir.Constant(_vector(count), [value] * count)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    # fmuladd, not fma: a processor that cannot fuse computes a product and a sum instead of a slow library call
    signature = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{a.type.count}f32")
    return builder.call(function, [a, b, c])


@intrinsic
def biases(typing: Any, b: Any, at: Any, step: Any, rows: Any, positions: Any) -> Any:
    """A tile whose row k is `b[at + k*step]` at every position; rows of SLOTS floats."""
    kind = types.UniTuple(Vector(SLOTS), rows.count * positions.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, stride = args[:3]
        values = []
        for _ in range(rows.count):
            scalar = builder.load(_address(context, builder, b, array, index), align=4)
            values += [_splat(builder, scalar, SLOTS)] * positions.count
            index = builder.add(index, stride)
        return context.make_tuple(builder, kind, values)

    return kind(b, at, step, rows, positions), build


@intrinsic
def zeros(typing: Any, slots: Any, rows: Any, columns: Any) -> Any:
    """A tile of zeros: for each row and column a vector of as many floats as the tuple `slots` is long."""
    kind = types.UniTuple(Vector(slots.count), rows.count * columns.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, kind, [_constant(0.0, slots.count)] * kind.count)

    return kind(slots, rows, columns), build


@intrinsic
def outer(typing: Any, tile: Any, x: Any, at: Any, positions: Any, w: Any, w_at: Any, w_step: Any) -> Any:
    """tile[k, p] += w[w_at + k*w_step] * x[at + positions[p]]: numbers times vectors."""
    count, width = positions.count, tile.dtype.count

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, x_array, start, offsets, w_array, index, stride = args
        total = cgutils.unpack_tuple(builder, values)
        starts = [builder.add(start, offset) for offset in cgutils.unpack_tuple(builder, offsets)]
        vectors = [_load(context, builder, x, x_array, begin, width) for begin in starts]
        for row in range(tile.count // count):
            factor = _splat(builder, builder.load(_address(context, builder, w, w_array, index), align=4), width)
            for position, vector in enumerate(vectors):
                k = row * count + position
                total[k] = _multiply_add(builder, factor, vector, total[k])
            index = builder.add(index, stride)
        return context.make_tuple(builder, tile, total)

    return tile(tile, x, at, positions, w, w_at, w_step), build


@intrinsic
def products(typing: Any, tile: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, columns: Any) -> Any:
    """tile[k, j] += a[a_at + k*a_step] * b[b_at + columns[j]]: vectors times vectors."""
    count, width = columns.count, tile.dtype.count

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, a_array, a_index, stride, b_array, start, offsets = args
        total = cgutils.unpack_tuple(builder, values)
        left = []
        for _ in range(tile.count // count):
            left.append(_load(context, builder, a, a_array, a_index, width))
            a_index = builder.add(a_index, stride)
        for column, offset in enumerate(cgutils.unpack_tuple(builder, offsets)):
            right = _load(context, builder, b, b_array, builder.add(start, offset), width)
            for row, vector in enumerate(left):
                k = row * count + column
                total[k] = _multiply_add(builder, vector, right, total[k])
        return context.make_tuple(builder, tile, total)

    return tile(tile, a, a_at, a_step, b, b_at, columns), build


@intrinsic
def add_sums(typing: Any, y: Any, at: Any, step: Any, columns: Any, tile: Any) -> Any:
    """y[at + k*step + j] += the sum over the vector tile[k, j]."""
    count = columns.count

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, stride, _, values = args
        for k, vector in enumerate(cgutils.unpack_tuple(builder, values)):
            if k and k % count == 0:
                start = builder.add(start, stride)
            element = builder.add(start, ir.Constant(start.type, k % count))
            address = _address(context, builder, y, array, element)
            total = builder.fadd(builder.load(address, align=4), _sum(builder, vector))
            builder.store(total, address, align=4)
        return context.get_dummy_value()

    return types.void(y, at, step, columns, tile), build


def _sum(builder: Any, vector: Any) -> Any:
    # halves onto halves: a fixed order of additions, whatever the processor
    count = vector.type.count
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_I32, count), list(range(k, k + count))))
            for k in (0, count)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@intrinsic
def put(typing: Any, y: Any, at: Any, step: Any, positions: Any, tile: Any) -> Any:
    """y[at + k*step + positions[p]] = tile[k, p]."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, start, stride, offsets, values = args
        shifts = cgutils.unpack_tuple(builder, offsets)
        for k, vector in enumerate(cgutils.unpack_tuple(builder, values)):
            if k and k % len(shifts) == 0:
                start = builder.add(start, stride)
            _store(context, builder, y, array, builder.add(start, shifts[k % len(shifts)]), vector)
        return context.get_dummy_value()

    return types.void(y, at, step, positions, tile), build


@intrinsic
def larger(typing: Any, best: Any, tile: Any, number: Any) -> Any:
    """Running maximum over the positions of a pooling window, and which position holds it.

    `best` is a tile of `2 * rows` vectors, maxima then numbers; the positions of `tile` count up from `number`. The
    first of equals wins, as in torch.
    """
    rows = best.count // 2
    count = tile.count // rows

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        held, values = (cgutils.unpack_tuple(builder, arg) for arg in args[:2])
        for position in range(count):
            index = builder.add(args[2], ir.Constant(args[2].type, position))
            name = _splat(builder, builder.sitofp(index, _F32), SLOTS)
            for row in range(rows):
                value = values[row * count + position]
                wins = builder.fcmp_ordered(">", value, held[row])
                held[row] = builder.select(wins, value, held[row])
                held[rows + row] = builder.select(wins, name, held[rows + row])
        return context.make_tuple(builder, best, held)

    return best(best, tile, number), build


@intrinsic
def put_pooled(typing: Any, y: Any, at: Any, step: Any, winner: Any, w_at: Any, w_step: Any, best: Any) -> Any:
    """Store the positive maxima of `larger` in y and the numbers of their positions in `winner` (bytes)."""
    rows = best.count // 2

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        y_array, index, stride, w_array, w_index, w_stride, held = args
        values = cgutils.unpack_tuple(builder, held)
        for row in range(rows):
            _store(context, builder, y, y_array, index, values[row])
            numbers = builder.fptoui(values[rows + row], ir.VectorType(ir.IntType(8), SLOTS))
            _store(context, builder, winner, w_array, w_index, numbers, align=1)
            index, w_index = builder.add(index, stride), builder.add(w_index, w_stride)
        return context.get_dummy_value()

    return types.void(y, at, step, winner, w_at, w_step, best), build


@intrinsic
def floor(typing: Any, rows: Any) -> Any:
    """The start of `larger`: maximum 0 at no position (number 4), which makes it ReLU after pooling."""
    kind = types.UniTuple(Vector(SLOTS), 2 * rows.count)

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [_constant(0.0, SLOTS)] * rows.count + [_constant(4.0, SLOTS)] * rows.count
        return context.make_tuple(builder, kind, values)

    return kind(rows), build


@intrinsic
def spread(typing: Any, total: Any, y: Any, at: Any, winner: Any, w_at: Any, d: Any, corners: Any) -> Any:
    """d[corners[n]] = y[at] where `winner` is n, else zero, for the four positions of a pooling window.

    Adds the spread values to `total`, a tile of one vector.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, y_array, index, w_array, w_index, d_array, offsets = args
        bytes16 = ir.VectorType(ir.IntType(8), SLOTS)
        address = _address(context, builder, winner, w_array, w_index)
        numbers = builder.load(builder.bitcast(address, bytes16.as_pointer()), align=1)
        value, zero = _load(context, builder, y, y_array, index, SLOTS), _constant(0.0, SLOTS)
        for number, corner in enumerate(cgutils.unpack_tuple(builder, offsets)):
            wins = builder.icmp_unsigned("==", numbers, ir.Constant(bytes16, [number] * SLOTS))
            _store(context, builder, d, d_array, corner, builder.select(wins, value, zero))
        alive = builder.icmp_unsigned("<", numbers, ir.Constant(bytes16, [4] * SLOTS))
        kept = builder.select(alive, value, zero)
        return context.make_tuple(builder, total, [builder.fadd(builder.extract_value(totals, 0), kept)])

    return total(total, y, at, winner, w_at, d, corners), build
