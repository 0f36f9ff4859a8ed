"""Cases for factorizations, solves, determinants and the cross product."""

import torch

from isthmus._graph.names import aten
from tests.support import Make, b8, bf16, c64, c128, case, f32, f64, fails, i64, u8, values

_TYPES = (f32, f64, c64, c128)
_LinAlgError = torch.linalg.LinAlgError


class _Named:
    """A function with a name that is the same in every process."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __str__(self):
        return self.name


def _positive(made: Make) -> Make:
    return made.then(lambda t: t @ t.mH + 3 * torch.eye(t.shape[-1], dtype=t.dtype))


def _dominant(made: Make) -> Make:
    """A well-conditioned matrix whose rows LU still exchanges."""
    return made.then(lambda t: (t / 3 + 4 * torch.eye(t.shape[-1], dtype=t.dtype)).roll(1, -2))


def _turned(t: torch.Tensor) -> torch.Tensor:
    return t.mT


def _factored(t: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lu_factor(t)[0]


SINGULAR = values([[1.0, 2.0], [2.0, 4.0]])
INDEFINITE = values([[4.0, 2.0, 0.0], [2.0, 1.0, 5.0], [0.0, 5.0, -1.0]])
PIVOTS = values([2, 3, 4, 4], dtype=torch.int32)
CASES = [
    fails(torch.linalg.cholesky, INDEFINITE, error=_LinAlgError, match="minor of order 2", id="indefinite"),
    fails(torch.linalg.inv, SINGULAR, error=_LinAlgError, match="singular", id="singular"),
    fails(torch.linalg.solve, SINGULAR, f32(2), error=_LinAlgError, match="singular", id="singular"),
    fails(torch.linalg.inv, bf16(3, 3), error=RuntimeError, match="[Ll]ow precision"),
    fails(torch.linalg.qr, bf16(3, 3), error=RuntimeError, match="[Ll]ow precision|not implemented"),
    fails(torch.linalg.det, f32(3, 4), error=RuntimeError, match="square"),
    fails(torch.linalg.solve, f32(3, 3), f32(4, 2), error=RuntimeError, match="[Ii]ncompatible shapes"),
    fails(torch.linalg.svd, values([[float("nan")]]), error=_LinAlgError, match="non-finite", id="nan"),
    fails(torch.linalg.eigh, values([[float("nan")]]), error=_LinAlgError, match="converge", id="nan"),
    fails(
        aten.cholesky.default, INDEFINITE, error=_LinAlgError, match="not positive-definite", id="indefinite"
    ),
    fails(
        aten.lu_unpack.default,
        f32(3, 3),
        values([9, 1, 1], dtype=torch.int32),
        error=RuntimeError,
        match="must be between 1 and",
    ),
    case(aten.cholesky.default, _positive(f32(3, 3)), True),
    case(torch.linalg.det, SINGULAR, id="singular"),
    case(torch.linalg.slogdet, SINGULAR, id="singular"),
    case(aten.linalg_lu_factor_ex.default, SINGULAR, id="singular"),
    case(_Named("cholesky_info", lambda t: torch.linalg.cholesky_ex(t).info), INDEFINITE, id="indefinite"),
    case(aten.linalg_cross.default, f32(4, 3), f32(4, 3)),
    case(aten.linalg_cross.default, i64(3, 4), i64(3, 1), dim=0),
    case(aten.linalg_cross.default, bf16(1, 3), bf16(4, 3)),
    case(aten.linalg_householder_product.default, f64(5, 3), f64(2).between(0, 1)),
    case(aten.linalg_householder_product.default, f64(5, 3), f64(0), id="no reflectors"),
    case(aten.linalg_solve_triangular.default, f64(2, 1, 4, 4).between(1, 2), f64(3, 4, 2), upper=True),
    case(aten.lu_unpack.default, f32(4, 5), PIVOTS),
    case(aten.lu_unpack.default, f32(4, 5), PIVOTS, True, False),
    case(aten.lu_unpack.default, f32(4, 5), PIVOTS, False, True),
]
for _type in _TYPES:
    _matrix, _batch = _dominant(_type(4, 4)), _dominant(_type(2, 3, 3))
    CASES += [
        case(aten._linalg_det.default, _matrix),
        case(aten._linalg_det.default, _matrix.then(_turned), id=f"{_matrix} transposed"),
        case(aten._linalg_det.default, _batch),
        case(aten._linalg_det.default, _type(0, 0)),
        case(aten._linalg_slogdet.default, _matrix),
        case(aten._linalg_slogdet.default, _batch.then(_turned), id=f"{_batch} transposed"),
        case(aten.linalg_inv_ex.default, _batch),
        case(aten.linalg_inv_ex.default, _type(2, 0, 0)),
        case(aten._linalg_solve_ex.default, _matrix, _type(4)),
        case(aten._linalg_solve_ex.default, _matrix.then(_turned), _type(4), id=f"{_matrix} transposed"),
        case(aten._linalg_solve_ex.default, _batch, _type(2, 3)),
        case(aten._linalg_solve_ex.default, _batch, _type(3, 5), id=f"{_batch} broadcast"),
        case(aten._linalg_solve_ex.default, _batch, _type(5, 3), left=False, id=f"{_batch} right"),
        case(aten._linalg_solve_ex.default, _type(0, 0), _type(0, 2)),
        case(aten.linalg_lu_factor_ex.default, _type(2, 3, 5)),
        case(aten.linalg_lu.default, _type(5, 3)),
        case(aten.linalg_lu.default, _type(0, 3)),
        case(aten.linalg_cholesky_ex.default, _positive(_type(2, 4, 4))),
        case(aten.linalg_cholesky_ex.default, _positive(_type(4, 4)).then(torch.triu), upper=True),
        case(aten.linalg_cholesky_ex.default, _type(0, 0)),
        case(aten.geqrf.default, _type(2, 5, 3)),
        case(aten.linalg_matrix_exp.default, _type(2, 3, 3).then(lambda t: t / 5)),
        case(torch.linalg.eigvalsh, _positive(_type(2, 4, 4))),
        case(torch.linalg.eigvalsh, _type(4, 4), UPLO="U"),
        case(torch.linalg.svdvals, _type(2, 5, 3)),
        case(torch.linalg.svdvals, _type(0, 3)),
    ]
    for _mode in ("reduced", "complete", "r"):
        CASES += [
            case(aten.linalg_qr.default, _type(*_s), _mode) for _s in ((5, 3), (2, 3, 5), (0, 3), (3, 0))
        ]
    for _flag in (False, True):
        CASES += [
            case(
                aten.cholesky_inverse.default,
                _positive(_type(2, 4, 4)).then(torch.linalg.cholesky, _turned if _flag else torch.clone),
                _flag,
            ),
            case(aten.cholesky_solve.default, _type(2, 4, 2), _type(4, 4).between(1, 2), _flag),
            case(aten.triangular_solve.default, _type(2, 4, 2), _type(4, 4).between(1, 2), _flag, not _flag),
            case(
                aten.linalg_solve_triangular.default,
                _type(4, 4).between(1, 2),
                _type(2, 4),
                upper=_flag,
                left=False,
                unitriangular=_flag,
            ),
        ]
        for _left in (False, True):
            CASES.append(
                case(
                    aten.linalg_lu_solve.default,
                    _matrix.then(_factored),
                    PIVOTS,
                    _type(4, 4),
                    left=_left,
                    adjoint=_flag,
                )
            )


def _rebuilt_eigh(t: torch.Tensor, uplo: str = "L") -> tuple[torch.Tensor, ...]:
    """What is unique about eigenvectors: the matrix they rebuild, and that they are orthonormal."""
    found, vectors = torch.linalg.eigh(t, UPLO=uplo)
    return found, (vectors * found.unsqueeze(-2)) @ vectors.mH, (vectors.mH @ vectors).abs() + 1


def _rebuilt_svd(t: torch.Tensor, full: bool) -> tuple[torch.Tensor, ...]:
    """What is unique about singular vectors: the matrix they rebuild, and that they are orthonormal."""
    U, S, Vh = torch.linalg.svd(t, full_matrices=full)
    rank = S.shape[-1]
    rebuilt = (U[..., :rank] * S.unsqueeze(-2)) @ Vh[..., :rank, :]
    return S, rebuilt, (U.mH @ U).abs() + 1, (Vh @ Vh.mH).abs() + 1


def _gradient(function: object) -> object:
    """The gradient of everything ``function`` returns, weighted so that no two elements count the same."""

    def gradient(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        found = function(*leaves)  # type: ignore[operator]
        found = found if isinstance(found, tuple) else (found,)
        total = sum(
            (f.abs() * torch.arange(1, f.numel() + 1, device=f.device).reshape(f.shape)).sum() for f in found
        )
        return torch.autograd.grad(total, leaves)

    return _Named("gradient", gradient)


for _type in (f64, c128):
    _matrix, _batch = _dominant(_type(4, 4)), _dominant(_type(2, 3, 3))
    _distinct = _type(4, 4).then(lambda t: t + t.mH + torch.diag(torch.arange(4.0) * 9).to(t.dtype))
    CASES += [
        case(_Named("eigh", _rebuilt_eigh), _positive(_type(2, 4, 4)), id=f"eigh {_batch}"),
        case(_Named("eigh", _rebuilt_eigh), _positive(_type(4, 4)), "U", id=f"eigh upper {_matrix}"),
        case(_Named("svd", _rebuilt_svd), _type(2, 5, 3), True, id=f"svd full {_batch}"),
        case(_Named("svd", _rebuilt_svd), _type(3, 5), False, id=f"svd {_matrix}"),
        case(_Named("svd", _rebuilt_svd), _type(0, 3), True, id=f"svd empty {_matrix}"),
        case(_gradient(torch.linalg.qr), _type(5, 3), id=f"gradient qr {_matrix}"),
        case(_gradient(torch.linalg.cholesky), _positive(_type(4, 4)), id=f"gradient cholesky {_matrix}"),
        case(_gradient(_rebuilt_eigh), _distinct, id=f"gradient eigh {_matrix}"),
        case(_gradient(lambda t: _rebuilt_svd(t, False)), _type(5, 3), id=f"gradient svd {_matrix}"),
        case(_gradient(torch.linalg.solve), _matrix, _type(4), id=f"gradient solve vector {_matrix}"),
    ]
    for _change, _name in ((lambda t: t, "contiguous"), (_turned, "transposed")):
        CASES += [
            case(_gradient(_op), _batch.then(_change), id=f"gradient {_op.__name__} {_batch} {_name}")
            for _op in (torch.linalg.det, torch.linalg.slogdet, torch.linalg.inv)
        ]
        CASES.append(
            case(
                _gradient(torch.linalg.solve),
                _batch.then(_change),
                _type(2, 3, 2),
                id=f"gradient solve {_batch} {_name}",
            )
        )


# Least squares, LDL, reflectors, general eigenvalues


def _eig(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is unique: that these are eigenvectors, their length, and the eigenvalues in some order."""
    found, vectors = torch.linalg.eig(t)
    wide = t.to(vectors.dtype)
    return wide @ vectors - vectors * found.unsqueeze(-2) + 1, vectors.abs().square().sum(-2), _ordered(found)


def _ordered(found: torch.Tensor) -> torch.Tensor:
    """Complex numbers by their real part, of which the inputs here have no two alike, then the imaginary."""
    key = (found.real * 1e3).round() * 1e3 + found.imag
    return found.gather(-1, key.argsort(-1))


def _lstsq(*args, **kwargs) -> tuple[torch.Tensor, ...]:
    return tuple(torch.linalg.lstsq(*args, **kwargs))


def _lstsq_into(*args, **kwargs) -> tuple[torch.Tensor, ...]:
    """The same written to tensors that are too small."""
    real = args[0].real.dtype
    out = [torch.empty(0, dtype=d, device=args[0].device) for d in (args[0].dtype, real, torch.int64, real)]
    return tuple(torch.linalg.lstsq(*args, **kwargs, out=tuple(out)))


LACKING = values([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])  # of rank 1
NAN = values([[float("nan"), 1.0], [1.0, 2.0]])
CASES += [
    fails(torch.linalg.eig, NAN, error=RuntimeError, match="should not contain infs or NaNs", id="nan"),
    fails(torch.linalg.lstsq, f32(3, 2), f32(4, 1), error=RuntimeError, match="size", id="lstsq rows"),
    fails(
        torch.linalg.lstsq,
        f32(3, 2),
        f32(3, 1),
        driver="gelx",
        error=RuntimeError,
        match="driver",
        id="driver",
    ),
    fails(torch.linalg.ldl_factor, values([[0.0]]), error=RuntimeError, match="error code: 1", id="singular"),
    case(aten.linalg_ldl_factor_ex.default, values([[0.0, 0.0], [0.0, 2.0]]), id="zero column"),
    case(aten.linalg_ldl_factor_ex.default, values([[0.0, 2.0], [2.0, 0.0]]), id="two rows"),
    case(_Named("eig", _eig), f32(0, 0), id="eig empty"),
]
for _type in _TYPES:
    CASES += [
        case(_Named("eig", _eig), _dominant(_type(2, 4, 4)), id=f"eig {_type(2, 4, 4)}"),
        case(
            _Named("eigvals", lambda t: _ordered(torch.linalg.eigvals(t))), _type(5, 5), id=f"{_type(5, 5)}"
        ),
    ]
    for _hermitian in (False, True):
        _symmetric = _type(3, 7, 7).then((lambda t: t + t.mH) if _hermitian else (lambda t: t + t.mT))
        CASES += [
            case(aten.linalg_ldl_factor_ex.default, _symmetric, hermitian=_hermitian),
            case(aten.linalg_ldl_factor_ex.default, _type(2, 0, 0), hermitian=_hermitian),
            case(
                _Named(
                    "ldl_solve",
                    lambda t, b, h: torch.linalg.ldl_solve(
                        *torch.linalg.ldl_factor(t, hermitian=h), b, hermitian=h
                    ),
                ),
                _symmetric,
                _type(7, 2),
                _hermitian,
                id=f"ldl_solve {_symmetric} {_hermitian}",
            ),
        ]
    for _left in (False, True):
        _other = _type(2, 5, 4) if _left else _type(2, 4, 5)
        # Long reflectors would make large numbers, of which small ones are the difference.
        _reflectors, _scales = _type(2, 5, 3).between(-0.5, 0.5), _type(2, 3).between(0, 1)
        CASES += [
            case(aten.ormqr.default, _reflectors, _scales, _other, _left, _flag) for _flag in (False, True)
        ]
    for _driver in ("gels", "gelsy", "gelsd", "gelss"):
        for _shape in ((5, 3), (3, 5), (2, 4, 4)):
            _id = f"lstsq {_driver} {_type(*_shape)}"
            CASES.append(
                case(_Named("", _lstsq), _type(*_shape), _type(*_shape[:-1], 2), driver=_driver, id=_id)
            )
for _driver in ("gels", "gelsy", "gelsd", "gelss"):
    CASES += [
        case(_Named("", _lstsq), f64(2, 4, 3), f64(2, 4), driver=_driver, id=f"lstsq {_driver} vector"),
        case(_Named("", _lstsq_into), f64(4, 3), f64(4, 2), driver=_driver, id=f"lstsq {_driver} out"),
        case(_Named("", _lstsq), f32(0, 3), f32(0, 2), driver=_driver, id=f"lstsq {_driver} no rows"),
        case(_Named("", _lstsq), f32(3, 0), f32(3, 2), driver=_driver, id=f"lstsq {_driver} no columns"),
        case(
            _Named("", _lstsq),
            c64(2, 0, 3),
            c64(2, 0, 2),
            driver=_driver,
            id=f"lstsq {_driver} no rows batch",
        ),
    ]
for _driver in ("gelsd", "gelss", "gelsy"):
    CASES.append(
        case(
            # The second singular value is all rounding.
            _Named("", lambda *a, **k: _lstsq(*a, **k)[:3]),
            LACKING,
            f32(3, 1),
            driver=_driver,
            id=f"lstsq {_driver} rank 1",
        )
    )
CASES += [
    case(_Named("", _lstsq), f64(4, 3), f64(4, 2), 0.7, driver="gelsd", id="lstsq rank by rcond"),
    case(_Named("", _lstsq), f64(3, 4), f64(3, 2), 0.7, driver="gelss", id="lstsq wide, rank by rcond"),
    case(_Named("", _lstsq), f64(4, 3), f64(4, 2), -1.0, driver="gelsy", id="lstsq negative rcond"),
    case(aten.addr.default, f32(3, 4), f32(3), f32(4), beta=0.5, alpha=-2),
    case(aten.addr.default, bf16(1, 4), bf16(3), bf16(4), beta=0.2, alpha=0.6),
    case(aten.addr.default, b8(3, 4), b8(3), b8(4), beta=False),
    case(aten.addr.default, i64(3, 1), u8(3), i64(4)),
    case(aten.addr.default, values([[float("nan")]]), f32(3), f32(4), beta=0, id="zero beta"),
    case(_gradient(lambda a, b: torch.linalg.lstsq(a, b)[0]), f64(5, 3), f64(5, 2), id="gradient lstsq"),
    case(_gradient(torch.linalg.eigvals), _dominant(f64(4, 4)), id="gradient eigvals"),
    case(_gradient(torch.ormqr), f64(5, 3), f64(3).between(0, 1), f64(5, 2), id="gradient ormqr"),
]
