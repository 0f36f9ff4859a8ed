"""Lazy mode: ops are recorded as nodes of a functional graph, and run as one program when a value is read."""
