"""Importing this module files every lowering."""

from isthmus._ops import binary, creation, matmul, reduction, unary  # noqa: F401
