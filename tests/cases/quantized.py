"""Cases for products of matrices held in eight bits."""

import torch

from isthmus._graph.names import aten
from isthmus._upstream import release
from tests.support import bf16, case, f16, f32, fails, i8, u8, values

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled_mm(a, b, dtypes, *args, **kwargs):
    """The scaled product of matrices rounded to 8-bit floats, in a type that can be compared."""
    return torch._scaled_mm(a.to(dtypes[0]), b.to(dtypes[1]).t(), *args, **kwargs).float()


def overflowing_scaled_mm(a, b, scale):
    """A scaled product that overflows 8 bits. CPUs whose kernel is oneDNN's give nan there, others the largest number,
    so the CPU multiplies in float32 and converts."""
    if a.device.type == "cpu":
        return (a.to(E4).float() @ b.to(E4).t().float() * scale * scale).to(E4).float()
    return scaled_mm(a, b, (E4, E4), scale, scale, out_dtype=E4)


def int8pack(x, weight, scales):
    """The product with an int8 weight; the CPU has none in float64, which says what half types should give."""
    if x.dtype == torch.float64:
        return (x @ weight.double().t()) * scales
    return torch._weight_int8pack_mm(x, weight, scales)


def scaled_mm_v2(a, b, scale_a, scale_b, recipe, *args):
    return torch._scaled_mm_v2(
        a.to(E4), b.to(E4).t(), [scale_a], [recipe], [0], [scale_b], [recipe], [0], *args
    ).float()


A, B = f32(5, 16), f32(32, 16)
ONE, TWO = values(0.5), values([[3.0]])
BY_ROW, BY_COLUMN = f32(5, 1), f32(1, 32)
BIG = values(900.0)
INT8 = (i8(4, 8).between(-128, 127), i8(8, 3).between(-128, 127))
UINT8 = u8(4, 8).between(0, 255)
WEIGHT = i8(6, 16).between(-128, 127)
CASES = [
    case(aten._int_mm.default, *INT8),
    # The CPU of older releases takes int8 alone, and what it refuses the device refuses.
    *([case(aten._int_mm.default, UINT8, INT8[1])] if release(torch.__version__) >= (2, 13) else []),
    case(aten._int_mm.default, i8(4, 0), i8(0, 3)),
    case(aten._int_mm.default, INT8[0], i8(3, 8).then(torch.t), id="transposed"),
    fails(aten._int_mm.default, INT8[0], i8(7, 3), error=RuntimeError, match="needs to match|reduction dim"),
    fails(aten._int_mm.default, f32(4, 8), INT8[1], error=RuntimeError, match="dtype"),
    # Sixteen columns: with eight, the CPU's bfloat16 kernel reads past its end where there is AVX-512.
    *[case(int8pack, t(4, 16), WEIGHT, t(6).between(0, 1)) for t in (f32, bf16, f16)],
    *[
        case(scaled_mm, A, B, (a, b), ONE, TWO, out_dtype=out, id=f"{a}-{b}-{out}")
        for a in (E4, E5)
        for b in (E4, E5)
        for out in (None, torch.bfloat16, torch.float32)
    ],
    case(scaled_mm, A, B, (E4, E4), BY_ROW, BY_COLUMN, out_dtype=torch.bfloat16, id="row by row"),
    case(scaled_mm, A, B, (E4, E5), ONE, TWO, bias=bf16(32), out_dtype=torch.bfloat16, id="bias"),
    case(scaled_mm, A, B, (E4, E4), ONE, TWO, scale_result=values(0.25), out_dtype=E4, id="scaled result"),
    case(
        scaled_mm, A, B, (E4, E4), ONE, TWO, scale_result=values(0.25), out_dtype=torch.float16, id="no need"
    ),
    case(overflowing_scaled_mm, A, B, BIG, id="the largest instead of nan"),
    case(scaled_mm, A, B, (E4, E4), BIG, BIG, out_dtype=E5, id="infinite"),
    case(scaled_mm, A, B, (E4, E4), ONE, TWO, out_dtype=torch.bfloat16, use_fast_accum=True, id="fast"),
    fails(
        scaled_mm,
        A,
        B,
        (E4, E4),
        f32(5, 2),
        f32(2, 32),
        error=ValueError,
        match="Invalid scaling",
        id="blocks",
    ),
    case(scaled_mm_v2, A, B, f32(1), f32(1), 0, None, torch.bfloat16, id="tensor"),
    case(scaled_mm_v2, A, B, BY_ROW, BY_COLUMN, 1, f32(32), torch.float32, id="row by row"),
]
