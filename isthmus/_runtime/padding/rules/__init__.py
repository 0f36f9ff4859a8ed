"""Rules per JAX primitive, a file per family; importing this package files them all."""

from isthmus._runtime.padding.rules import (
    control,
    dot,
    elementwise,
    index,
    linalg,
    random,
    reduce,
    shape,
    slicing,
    window,
)

__all__ = [
    "control",
    "dot",
    "elementwise",
    "index",
    "linalg",
    "random",
    "reduce",
    "shape",
    "slicing",
    "window",
]
