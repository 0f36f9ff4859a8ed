"""Cases for Airy and Bessel functions, orthogonal polynomials, gamma's relatives and sums of powers."""

import math

import torch

from isthmus._graph.names import aten
from tests.support import b8, bf16, c64, case, f16, f32, f64, fails, i32, i64, u8, values

INF, NAN = math.inf, math.nan
EDGE = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-7, 2.0, -2.09, 2.09, 5.0, 8.0, -8.0, 60.0, 104.0, -1e4, 1e30]


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.t()


CASES = []
_BESSEL = (
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 erfcx"
)
for _name in _BESSEL.split():
    _op = getattr(aten, f"special_{_name}").default
    CASES += [
        case(_op, f32(20, 30).between(-12, 12).then(_turned)),
        case(_op, f64(200).between(-30, 30)),
        case(_op, f64(200).between(0, 6), id="near"),
        case(_op, values(EDGE), id="edge"),
        case(_op, values(EDGE, dtype=torch.float64), id="edge-f64"),
        case(_op, i64(5)),
        case(_op, b8(3)),
        case(_op, f32(0), id="empty"),
        case(_op, f64(), id="0-dim"),
        fails(_op, f16(3), error=NotImplementedError, match="not implemented for 'Half'"),
        fails(_op, c64(3), error=NotImplementedError, match="not implemented for 'ComplexFloat'"),
    ]

_POLYNOMIALS = (
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l "
    "legendre_polynomial_p"
)
# No infinite degree: what C++ makes of one differs between processors.
_DEGREES = [-2.0, -0.5, 0.0, 1.0, 1.9, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 30.0, 128.0, 129.0, 513.0]
for _name in _POLYNOMIALS.split():
    _packet = getattr(aten, f"special_{_name}")
    CASES += [
        case(_packet.default, f64(30, 1).between(-1.5, 1.5), i64(12).between(-1, 10)),
        # Among their zeros float32 leaves few digits, and which ones depends on the compiler.
        case(_packet.default, f32(30, 1).between(-9, -6), i64(12).between(-1, 10), id="beyond"),
        case(_packet.default, f64(30, 1).between(-2, 2), values(_DEGREES, dtype=torch.float64), id="degrees"),
        case(
            _packet.default,
            values([[0.0], [-0.0], [1.0], [-1.0], [0.5], [INF], [-INF], [1e-30]]),
            values([float(n) for n in range(-1, 12)]),
            id="edge",
        ),
        case(_packet.default, i32(4), u8(4)),
        case(_packet.default, f64(0, 3), f64(3), id="empty"),
        case(_packet.x_scalar, 0.3, f32(3, 4).between(0, 12).then(_turned)),
        case(_packet.x_scalar, 2, i64(5).between(0, 6)),
        case(_packet.n_scalar, f64(20).between(-1, 1), 11),
        case(_packet.n_scalar, f32(), 3, id="0-dim"),
        fails(_packet.default, f16(3), f16(3), error=NotImplementedError, match="not implemented for 'Half'"),
    ]
# The recurrence of a degree that only one element has, and what stops it early: nan.
CASES += [
    case(aten.special_legendre_polynomial_p.default, values([0.3, 1.5, -0.9]), values([3000.0, 3000.0, 2.0])),
    case(aten.special_laguerre_polynomial_l.default, f32(4).between(0, 2), values([-1e20, 0.0, 700.0, 1.0])),
]

CASES += [
    case(aten.special_zeta.default, values([199.0, 41.0, INF, NAN, 2.0]), values([-0.5, 8.4, 2.0, 1.0, NAN])),
    case(aten.special_zeta.default, f64(9, 1).between(1, 30), f64(40).between(0.01, 40)),
    case(aten.special_zeta.default, values([[3.0], [20.0], [2.0]]), values([-9.5, -2.25, -0.1, 1e-10, 1e10])),
    case(aten.polygamma.default, 1, values([INF, 0.0, -1.5, 1e10, 0.3])),
    case(aten.polygamma.default, 40, values([8.4, 9.9, 100.0, 1.0, -0.5]), id="past float32"),
    case(aten.polygamma.default, 20, values([-9.5, -2.5, 0.5, 3.0], dtype=torch.float64)),
]
_LARGE = [0.5, 20.0, 150.0, 200.0, 201.0, 1e4, 1e6, 1e10]
for _op in (aten.igamma.default, aten.igammac.default):
    CASES += [
        case(_op, values([[a] for a in _LARGE]), values([0.99 * a for a in _LARGE] + _LARGE)),
        case(_op, values(_LARGE, dtype=torch.float64), values(_LARGE, dtype=torch.float64), id="at a"),
        case(
            _op,
            values([1e6, 1e8, 1e10], dtype=torch.float64),
            values([1e6 + 2e3, 1e8 - 1e4, 1e10 + 3e5], dtype=torch.float64),
            id="large",
        ),
        case(
            _op, values([[0.0], [1.0], [INF], [-1.0], [NAN]]), values([0.0, 1.0, INF, -1.0, NAN]), id="edges"
        ),
        case(_op, bf16(9).between(0.1, 6), bf16(9).between(0.1, 6)),
    ]

_SAMPLES = [0.0, 1e-6, 0.1, 0.79, 0.8, 2.0, 7.5, 8.0, 8.3, 9.5, 30.0, 200.0]
CASES += [
    case(aten._standard_gamma_grad.default, f32(40).between(0.05, 12), f32(40).between(0.05, 15)),
    case(
        aten._standard_gamma_grad.default,
        values([[a] * 12 for a in (0.01, 1.0, 4.0, 8.0, 9.0, 100.0)], dtype=torch.float64),
        values([_SAMPLES] * 6, dtype=torch.float64),
    ),
    fails(
        aten._standard_gamma_grad.default,
        f16(3),
        f16(3),
        error=NotImplementedError,
        match="not implemented for",
    ),
    case(
        aten._dirichlet_grad.default,
        values([[x] * 8 for x in (0.0, 0.01, 0.3, 0.5, 0.55, 0.9, 0.999)], dtype=torch.float64),
        values([[0.1, 1.0, 5.0, 7.0, 7.0, 20.0, 100.0, 3.0]] * 7, dtype=torch.float64),
        values([[0.3, 9.0, 10.0, 14.0, 40.0, 40.0, 200.0, 3.5]] * 7, dtype=torch.float64),
    ),
    case(
        aten._dirichlet_grad.default,
        f32(30).between(0.1, 0.9),
        f32(30).between(1, 9),
        f32(30).between(10, 20),
    ),
]

CASES += [
    case(aten.logit.default, i64(4).between(-1, 2)),
    case(aten.logit.default, b8(4), 0.25),
    case(aten.logit.default, values([NAN, -0.1, 0.0, 0.5, 1.0, 1.5]), 0.7, id="edge"),
    case(aten.copysign.Tensor, i64(4), i64(4)),
    case(aten.copysign.Tensor, b8(4), values(-0.0)),
    case(aten.erfinv.default, values([1 - 2.0**-24, 0.9999, -0.99999, 1.0, -1.0, 1.5])),
    case(aten.logaddexp.default, c64(30).between(-9, 9), c64(30).between(-8, 9)),
    case(
        aten.logaddexp.default,
        values([[complex(INF, 1)], [complex(-INF, 1)], [complex(NAN, 1)], [complex(1, INF)], [1 + 2j]]),
        values([complex(INF, 2), complex(-INF, 1), complex(1, NAN), complex(1, 3), 50 - 3j]),
        id="edge",
    ),
    fails(
        aten.logaddexp2.default,
        c64(3),
        c64(3),
        error=NotImplementedError,
        match="not implemented for 'Complex",
    ),
    case(aten.logsumexp.default, c64(3, 4, 5).between(-9, 9), [0, 2]),
    case(aten.logsumexp.default, c64(3, 4).then(_turned), [1], True),
    case(aten.hash_tensor.default, f32(3, 4).then(_turned)),
    case(aten.hash_tensor.default, values([NAN, -0.0, INF, 1.5], dtype=torch.float64), [0], keepdim=True),
    case(aten.hash_tensor.default, i32(3, 4), [1]),
    case(aten.hash_tensor.default, bf16(3, 4), [0, 1], keepdim=True),
    case(aten.hash_tensor.default, b8(5)),
    case(aten.hash_tensor.default, f64(), id="0-dim"),
    fails(
        aten.hash_tensor.default, f32(0), error=RuntimeError, match="Expected reduction dim to be specified"
    ),
]
for _ord in (0, 1, 2, 0.5, -1, INF, -INF):
    CASES += [
        case(aten._foreach_powsum.Scalar, [f32(4), c64(3, 2), f32(0), f64()], _ord),
        case(
            aten.linalg__powsum.default,
            values([[0.0, -2.0, 0.5], [NAN, 1.0, INF]]),
            _ord,
            [1],
            id=f"edge,{_ord}",
        ),
    ]
CASES += [
    case(aten._foreach_powsum.Scalar, [bf16(400), f16(400)], 2),
    case(aten._foreach_powsum.Scalar, [i64(4), f16(400)], 3, torch.float64),
    case(aten.linalg__powsum.default, f64(3, 4).then(_turned), 3, [0, 1], True),
    fails(
        aten._foreach_powsum.Scalar,
        [i64(4)],
        2,
        error=NotImplementedError,
        match="not implemented for 'Long'",
    ),
]
