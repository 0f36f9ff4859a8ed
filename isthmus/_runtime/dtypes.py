"""torch dtypes and JAX dtypes: one table, both ways. What only one of the two has is refused by name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

_NAMES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def _scalar_type(name: str) -> Any:
    return np.bool_ if name == "bool" else getattr(jnp, name, None)


# A dtype that this release of torch or JAX lacks (the float8 types came one by one) is left out.
_TO_JAX: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(_scalar_type(name))
    for name in _NAMES
    if hasattr(torch, name) and _scalar_type(name) is not None
}
_TO_TORCH = {value: key for key, value in _TO_JAX.items()}


def to_jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return JAX's dtype for torch's; raise TypeError for one that XLA does not have."""
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise TypeError(f"device 'jax' has no dtype {dtype}: XLA does not know it") from None


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for JAX's."""
    return _TO_TORCH[np.dtype(dtype)]
