"""Cases for joining, repeating, padding, triangles, diagonals and writes into views."""

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, case, f32, f64, fails, i32, i64, values

CPU = torch.device("cpu")


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, -1)


CASES = [
    case(aten.cat.default, [f32(2, 4), f32(4, 3).then(_turned), f32(1, 4)]),
    case(aten.cat.default, [f32(2, 4), i64(2, 1)], -1, id="promotes"),
    case(aten.cat.default, [f32(0), f32(2, 4)], 0, id="skips (0,)"),
    case(aten.cat.default, [b8(3), b8(0)]),
    fails(aten.cat.default, [f32(2, 4), f32(2, 3)], error=RuntimeError, match="Sizes of tensors must match"),
    case(aten.stack.default, [f32(3, 4), f32(4, 3).then(_turned)], -2),
    case(aten.stack.default, [i32(), i32()]),
    case(aten.stack.default, [f32(2), f64(2)], 1, id="promotes"),
    fails(aten.stack.default, [f32(2), f32(3)], error=RuntimeError, match="equal size"),
    case(aten.flip.default, f32(3, 4, 2).then(_turned), [0, -1]),
    case(aten.flip.default, b8(3, 4), []),
    case(aten.roll.default, f32(3, 4).then(_turned), [1, -2], [0, -1]),
    case(aten.roll.default, i64(3, 4), [5]),
    case(aten.roll.default, f32(0, 4), [1], [0], id="empty"),
    case(aten.repeat.default, f32(3, 4).then(_turned), [2, 1, 3]),
    case(aten.repeat.default, b8(3), [0], id="none"),
    case(aten.repeat.default, f32(), [2, 2], id="0-dim"),
    case(aten.constant_pad_nd.default, f32(3, 4).then(_turned), [1, 2, 0, 1], 2.5),
    case(aten.constant_pad_nd.default, i64(3, 4), [-1, 2]),
    case(aten.constant_pad_nd.default, bf16(3, 4), [0, -1, -1, -1], 1),
    case(aten.tril.default, f32(3, 4).then(_turned), -1),
    case(aten.tril.default, b8(2, 3, 3), 1),
    case(aten.triu.default, f32(3, 4).then(_turned), 1),
    case(aten.triu.default, i64(0, 3)),
    case(aten.tril_indices.default, 3, 4, 1, device=CPU),
    case(aten.tril_indices.default, 3, 2, dtype=torch.int32, device=CPU),
    case(aten.triu_indices.default, 3, 4, -1, device=CPU),
    case(aten.triu_indices.default, 0, 2, device=CPU),
    case(aten.diag_embed.default, f32(3, 2).then(_turned), 1),
    case(aten.diag_embed.default, i64(2, 3), -1, 0, -1),
    case(aten.diagonal_scatter.default, f32(3, 4).then(_turned), f32(3)),
    case(aten.diagonal_scatter.default, i64(2, 3, 4), i64(3, 2), -1, 2, 0),
    case(aten.diagonal_backward.default, f32(3, 3).then(_turned), [3, 4, 3], 1, 0, 1),
    case(aten.diagonal_backward.default, bf16(2, 3), [2, 4, 3], 0, 2, 1),
    case(aten.select_scatter.default, f32(3, 4).then(_turned), f32(4), -1, -2),
    case(aten.select_scatter.default, i64(3, 4), i64(4), 0, 1),
    fails(
        aten.select_scatter.default,
        f32(3),
        f32(),
        0,
        3,
        error=IndexError,
        match="out of range for tensor of size",
    ),
    case(aten.select_backward.default, f32(4), [3, 4], 0, -1),
    case(aten.select_backward.default, bf16(3), [3, 4], -1, 2),
    case(aten.slice_scatter.default, f32(3, 5).then(_turned), f32(2, 3), 0, 1, 5, 2),
    case(aten.slice_scatter.default, i64(5), i64(2), 0, -2),
    case(aten.slice_scatter.default, b8(5), b8(0), 0, 3, 3, id="empty"),
    case(aten.slice_backward.default, f32(2, 4), [5, 4], 0, 1, 3, 1),
    case(aten.slice_backward.default, f32(3, 2).then(_turned), [2, 6], -1, -6, 2**62, 2),
    case(aten.slice_backward.default, bf16(2, 0), [2, 6], 1, 9, 12, 1, id="empty"),
    case(aten.unfold_backward.default, f32(3, 2, 4), [3, 6], 1, 4, 2),
    case(aten.unfold_backward.default, f32(4, 3, 2), [7, 3], 0, 2, 1),
    case(aten.as_strided_scatter.default, f32(3, 4), f32(2, 2), [2, 2], [4, 2], 1),
    case(aten.as_strided_scatter.default, f32(3, 4).then(_turned), f32(2), [2], [5]),
    case(aten.im2col.default, f32(2, 3, 6, 5), [2, 3], [1, 1], [1, 0], [2, 1]),
    case(aten.im2col.default, f32(3, 6, 5), [2, 2], [2, 1], [0, 0], [1, 1]),
    case(aten.col2im.default, f32(2, 18, 12), [6, 5], [2, 3], [1, 1], [1, 0], [2, 1]),
    case(aten.col2im.default, f32(4, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    case(aten.channel_shuffle.default, f32(2, 6, 3), 3),
    case(aten.channel_shuffle.default, i64(1, 4, 2, 2), 2),
    case(aten.pixel_shuffle.default, f32(2, 8, 3, 2), 2),
    case(aten.pixel_shuffle.default, i64(9, 1, 2), 3),
    case(aten.pixel_unshuffle.default, f32(2, 2, 6, 4), 2),
    case(aten.pixel_unshuffle.default, bf16(1, 6, 3), 3),
    case(aten.split_with_sizes_copy.default, f32(5, 2).then(_turned), [2, 0, 3], -1),
    case(aten.unbind_copy.int, i64(3, 2), 1),
    case(aten.as_strided_copy.default, f32(3, 4), [2, 2], [1, 4], 1),
    case(aten.select_copy.int, values([[1, 2], [3, 4]]), 1, -1),
]
for _name in ("reflection_pad", "replication_pad"):
    for _rank, _padding in ((1, [2, 1]), (2, [1, 2, 0, 2]), (3, [1, 0, 2, 1, 1, 1])):
        _shape = (2, 3, 4, 4)[: _rank + 1]
        _padded = tuple(
            n + (sum(_padding[2 * (_rank - d) : 2 * (_rank - d) + 2]) if d else 0)
            for d, n in enumerate(_shape)
        )
        _forward = getattr(aten, f"{_name}{_rank}d").default
        _backward = getattr(aten, f"{_name}{_rank}d_backward").default
        CASES += [
            case(_forward, f32(*_shape), _padding),
            case(
                _forward,
                f32(1, *_shape).then(lambda t: t.transpose(-1, -2) if t.shape[-1] == t.shape[-2] else t),
                _padding,
            ),
            case(_backward, f32(*_padded), f32(*_shape), _padding),
            case(_backward, f64(1, *_padded), f64(1, *_shape), _padding),
        ]
CASES += [
    case(aten.replication_pad1d.default, f32(2, 4), [-1, 2], id="negative"),
    fails(
        aten.reflection_pad1d.default,
        f32(2, 3),
        [3, 0],
        error=RuntimeError,
        match="Padding size should be less",
    ),
]
