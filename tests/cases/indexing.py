"""Cases for reads and writes at positions known only at run time."""

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, c64, case, f32, f64, fails, i32, i64, u8, values

ROWS = values([2, 0, -1])
COLS = values([[1], [-2]])
UNIQUE = values([2, 0])
MASK = values([True, False, True])
FAR = values([1, 5])
BELOW = values([0, -4])
OUT = "out of bounds for dimension"


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, -1)


CASES = [
    case(aten.index.Tensor, f32(4, 3).then(_turned), [ROWS]),
    case(aten.index.Tensor, f32(3, 4, 5), [ROWS, None, ROWS], id="apart, so in front"),
    case(aten.index.Tensor, f32(3, 4, 5), [None, COLS, ROWS], id="together, so in place"),
    case(aten.index.Tensor, i32(3, 4), [values([0, 2], dtype=torch.int32)]),
    case(aten.index.Tensor, f32(3, 4), [i64(0)], id="empty"),
    case(aten.index.Tensor, f32(3, 0), [FAR], id="nothing to read"),
    case(aten.index.Tensor, f32(3, 4), [values(1)], id="0-dim index"),
    case(aten.index.Tensor, f32(3, 4), [b8(3, 4)], id="mask"),
    case(aten.index.Tensor, f32(3, 4, 5), [None, b8(4, 5)], id="mask of two dims"),
    case(aten.index.Tensor, f32(3, 4), [MASK, values([1, 2])], id="mask and index"),
    case(aten.index.Tensor, f32(3, 4), [values([1, 0, 1], dtype=torch.uint8)], id="uint8 mask"),
    fails(aten.index.Tensor, f32(), [values(True)], error=IndexError, match="too many indices"),
    fails(aten.index.Tensor, f32(3, 4), [FAR], error=IndexError, match=OUT),
    fails(aten.index.Tensor, f32(3, 4), [None, values([-5])], error=IndexError, match=f"{OUT} 1 with size 4"),
    fails(aten.index.Tensor, f32(3, 4), [b8(2)], error=IndexError, match="The shape of the mask"),
    fails(aten.index.Tensor, f32(3), [MASK, MASK], error=IndexError, match="too many indices"),
    case(aten._unsafe_index.Tensor, f32(3, 4), [None, values([1, -1])]),
    case(aten._unsafe_index.Tensor, bf16(3, 4), [values([[0], [1]]), values([1, 2])]),
    case(aten._unsafe_masked_index.default, f32(3), values([True, False]), [values([1, 9])], 7.0),
    case(aten._unsafe_masked_index.default, i64(3), values([False, True]), [values([-9, 2])], 7),
    case(
        aten._unsafe_masked_index_put_accumulate.default,
        f32(3),
        values([True, False, True]),
        [values([1, 9, 1])],
        f32(3),
    ),
    case(
        aten._unsafe_masked_index_put_accumulate.default,
        i64(3),
        values([False, True]),
        [values([-9, 2])],
        i64(2),
    ),
    case(aten.gather.default, f32(4, 3).then(_turned), 1, values([[0, 3], [2, 2]])),
    case(aten.gather.default, f32(3, 4), -2, values([[0, 2, 1]])),
    case(aten.gather.default, b8(3, 4), 0, i64(0, 4), id="empty"),
    case(aten.gather.default, f32(), 0, values([0, 0]), id="0-dim"),
    case(aten.gather.default, f32(3), 0, values(2), id="0-dim index"),
    fails(aten.gather.default, f32(3), 0, FAR, error=RuntimeError, match=f"{OUT} 0 with size 3"),
    fails(aten.gather.default, f32(3), 0, BELOW, error=RuntimeError, match=f"{OUT} 0 with size 3"),
    case(aten.index_select.default, f32(4, 3).then(_turned), -1, values([3, 0, 3])),
    case(aten.index_select.default, b8(3, 4), 0, values(1), id="0-dim index"),
    case(aten.index_select.default, f32(), 0, values([0]), id="0-dim"),
    case(aten.index_select.default, f32(3, 4), 1, i64(0), id="empty"),
    fails(aten.index_select.default, f32(3), 0, FAR, error=IndexError, match="index out of range in self"),
    fails(aten.index_select.default, f32(3), 0, BELOW, error=IndexError, match="index out of range in self"),
    case(aten.take.default, f32(4, 3).then(_turned), values([[0, -1], [5, 5]])),
    case(aten.take.default, i64(3, 4), i64(0), id="empty"),
    fails(aten.take.default, f32(3), FAR, error=IndexError, match="out of range"),
    case(aten.masked_select.default, f32(4, 3).then(_turned), b8(3, 4)),
    case(aten.masked_select.default, i64(3, 1), b8(4), id="broadcast"),
    case(aten.nonzero.default, f32(4, 3).between(-1, 1).then(_turned)),
    case(aten.nonzero.default, b8(9)),
    case(aten.nonzero.default, f32(), id="0-dim"),
    case(aten.nonzero.default, f32(0, 3), id="empty"),
    case(aten.nonzero_static.default, b8(3, 4), size=3),
    case(aten.nonzero_static.default, f32(5, 0, 5), size=3, id="empty"),
    case(aten.nonzero_static.default, values([0, 2, 0, 1]), size=4, fill_value=-1),
]
for _op in (aten.index_put.default, aten._unsafe_index_put.default):
    for _accumulate in (False, True):
        CASES += [
            case(_op, f32(4, 3).then(_turned), [UNIQUE], f32(4), _accumulate),
            case(
                _op,
                f32(3, 4, 5),
                [UNIQUE, None, values([1, 2])],
                f32(2, 4),
                _accumulate,
                id=f"apart {_accumulate}",
            ),
            case(_op, i64(3, 4), [UNIQUE], values(7), _accumulate),
            case(_op, b8(3, 4), [UNIQUE], values(True), _accumulate),
            case(_op, bf16(3, 4), [i64(0)], bf16(4), _accumulate, id=f"empty {_accumulate}"),
        ]
CASES += [
    case(aten.index_put.default, f32(3, 4), [values([1, 1, 0])], f32(3, 4), True, id="the same row twice"),
    case(aten._index_put_impl.default, f32(3, 4), [values([1, 1, 0])], f32(3, 4), True, True),
    case(aten._index_put_impl.default, i64(3), [values([-1])], values([9])),
    case(aten.index_put.default, f32(3, 4), [b8(3, 4)], values(5.0), id="mask and one value"),
    case(aten.index_put.default, f32(3, 4), [MASK], values(5.0), id="mask of rows and one value"),
    case(aten.index_put.default, f32(4, 3), [None, MASK], values([5.0]), id="mask of columns and one value"),
    case(aten.index_put.default, f32(3, 4), [MASK], f32(4), id="mask and a row"),
    case(aten.index_put.default, f32(3, 4), [MASK], f32(2, 4), True, id="mask and rows to add"),
    fails(
        aten.index_put.default, f32(), [values(True)], values(5.0), error=IndexError, match="too many indices"
    ),
    fails(aten.index_put.default, f32(3), [FAR], f32(2), error=IndexError, match=OUT),
    fails(aten.index_put.default, f32(3), [UNIQUE], f64(2), error=RuntimeError, match="dtypes match"),
    fails(aten.index_put.default, f32(3), [UNIQUE], f32(5), error=RuntimeError, match="shape mismatch"),
    case(aten.put.default, f32(4, 3).then(_turned), values([0, -1, 5]), f32(3)),
    case(aten.put.default, i64(3, 4), values([5, 5]), i64(2), True),
    fails(aten.put.default, f32(3), FAR, f32(2), error=IndexError, match="out of range"),
    case(aten.scatter.src, f32(4, 3).then(_turned), 1, values([[0, 3], [2, 1]]), f32(3, 4)),
    case(aten.scatter.src, f32(3, 4), -2, values([[0, 2, 1]]), f32(2, 3)),
    case(aten.scatter.src, b8(3), 0, UNIQUE, b8(2)),
    case(aten.scatter.src, f32(), 0, values(0), f32(), id="0-dim"),
    case(aten.scatter.value, f32(3, 4), 1, values([[0, 3], [2, 1]]), 2.5),
    case(aten.scatter.value, i64(3, 4), 0, i64(0, 4), 2, id="empty"),
    case(aten.scatter.reduce, f32(3, 4), 1, values([[0, 0], [2, 1]]), f32(3, 4), reduce="add"),
    case(aten.scatter.reduce, i64(3, 4), 0, values([[0, 0], [0, 1]]), i64(3, 4), reduce="multiply"),
    case(aten.scatter.value_reduce, f32(3, 4), 1, values([[0, 0], [2, 1]]), 2.5, reduce="multiply"),
    case(aten.scatter.value_reduce, i32(3, 4), 1, values([[0, 0], [2, 1]]), 2, reduce="add"),
    case(aten.scatter_add.default, f32(4, 3).then(_turned), -1, values([[0, 0, 3], [2, 1, 1]]), f32(3, 4)),
    case(aten.scatter_add.default, b8(3), 0, values([0, 0]), b8(2)),
    case(aten.scatter_add.default, c64(3), 0, values([0, 0]), c64(2)),
    fails(aten.scatter.src, f32(3), 0, FAR, f32(2), error=RuntimeError, match=OUT),
    fails(aten.scatter.value, f32(3), 0, BELOW, 1.0, error=RuntimeError, match=OUT),
    fails(aten.scatter_add.default, f32(3), 0, FAR, f32(2), error=RuntimeError, match=OUT),
    case(aten.index_add.default, f32(4, 3).then(_turned), -1, values([3, 0, 3]), f32(3, 3)),
    case(aten.index_add.default, f32(3, 4), 0, UNIQUE, f32(2, 4), alpha=-2),
    case(aten.index_add.default, i64(3), 0, values(1), i64(1), id="0-dim index"),
    case(aten.index_add.default, f32(), 0, values(0), f32(), id="0-dim"),
    fails(aten.index_add.default, f32(3, 4), 0, FAR, f32(2, 4), error=RuntimeError, match=OUT),
    fails(aten.index_add.default, f32(3), 0, FAR, f32(2), error=IndexError, match="index out of range"),
    case(aten.index_copy.default, f32(4, 3).then(_turned), -1, values([3, 0]), f32(3, 2)),
    case(aten.index_copy.default, b8(3, 4), 0, UNIQUE, b8(2, 4)),
    fails(aten.index_copy.default, f32(3), 0, FAR, f32(2), error=IndexError, match=f"index_copy_.*{OUT}"),
    case(aten.index_fill.int_Scalar, f32(4, 3).then(_turned), -1, values([3, -4]), 2),
    case(aten.index_fill.int_Scalar, i64(), 0, values([0]), 2, id="0-dim"),
    case(aten.index_fill.int_Tensor, f32(3, 4), 0, values(1), values(2.0)),
    case(aten.index_fill.int_Tensor, b8(3, 4), 1, i64(0), values(True), id="empty"),
    fails(aten.index_fill.int_Scalar, f32(3), 0, FAR, 1.0, error=IndexError, match=OUT),
    case(aten.masked_scatter.default, f32(4, 3).then(_turned), b8(3, 4), f32(12)),
    case(aten.masked_scatter.default, i64(3, 4), b8(4), i64(5, 4), id="broadcast"),
    fails(
        aten.masked_scatter.default,
        f32(3),
        values([True, True, False]),
        f32(1),
        error=RuntimeError,
        match="Number of elements of source",
    ),
    case(aten.masked_scatter_backward.default, f32(3, 4), b8(3, 4), [3, 4]),
    case(aten.masked_scatter_backward.default, bf16(3, 4), b8(3, 4), [20]),
]
for _reduce in ("sum", "prod", "mean", "amax", "amin"):
    for _include in (True, False):
        CASES += [
            case(
                aten.scatter_reduce.two,
                f32(4, 3).then(_turned),
                -1,
                values([[0, 0, 3], [2, 1, 1]]),
                f32(3, 4),
                _reduce,
                include_self=_include,
                id=f"{_reduce} {_include}",
            ),
            case(
                aten.scatter_reduce.two,
                i64(3),
                0,
                values([0, 0, 2]),
                i64(3),
                _reduce,
                include_self=_include,
                id=f"int {_reduce} {_include}",
            ),
        ]
        if _reduce != "sum":
            CASES.append(
                case(
                    aten.index_reduce.default,
                    f32(3, 4),
                    0,
                    values([0, 0, 2]),
                    f32(3, 4),
                    _reduce,
                    include_self=_include,
                    id=f"{_reduce} {_include}",
                )
            )
CASES += [
    fails(
        aten.index_reduce.default,
        f32(3),
        0,
        FAR,
        f32(2),
        "amax",
        error=IndexError,
        match="index out of range",
    ),
    case(aten._unique2.default, i64(3, 4), True, True, True),
    case(aten._unique2.default, f32(5)),
    case(aten._unique2.default, b8(5), True, True),
    case(
        aten._unique2.default,
        values([1.0, float("nan"), 0.0, float("nan"), -0.0]),
        True,
        True,
        True,
        id="nan",
    ),
    case(aten._unique2.default, i64(0), True, True, True, id="empty"),
    case(aten.unique_dim.default, i64(6, 2).between(0, 1), 0, True, True, True),
    case(aten.unique_dim.default, i64(2, 6).between(0, 1), 1),
    case(aten.unique_dim.default, i64(0, 3), 0, True, True, True, id="no rows"),
    fails(aten.unique_dim.default, i64(3, 0), 0, error=RuntimeError, match="0 sized dimensions"),
    fails(aten.unique_consecutive.default, f32(3, 0), True, True, 0, error=RuntimeError, match="0 sized"),
    case(aten.unique_consecutive.default, i64(12).between(0, 1), True, True),
    case(aten.unique_consecutive.default, i64(6, 2).between(0, 1), True, True, 0),
    case(aten.unique_consecutive.default, f32(0), True, True, id="empty"),
    case(aten.bincount.default, u8(9)),
    case(aten.bincount.default, i64(9).between(0, 4), f32(9), 7),
    case(aten.bincount.default, i64(9).between(0, 4), i64(9)),
    case(aten.bincount.default, i64(0), None, 3, id="empty"),
    case(aten.bincount.default, i64(0), f32(0), 3, id="empty, weighted"),
    fails(aten.bincount.default, values([1, -1]), error=RuntimeError, match="1-d non-negative integral"),
    case(aten.repeat_interleave.Tensor, values([2, 0, 3])),
    case(aten.repeat_interleave.Tensor, values([2, 1], dtype=torch.int32), output_size=3),
    fails(
        aten.repeat_interleave.Tensor,
        values([2, -1]),
        error=RuntimeError,
        match="repeats can not be negative",
    ),
]
