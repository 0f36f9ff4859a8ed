"""Calls in ATen terms, insulated from torch's schemas; nothing here imports JAX."""
