"""Cases of ops as data: a file per family, each with a list ``CASES`` of ``case(...)`` and ``fails(...)`` rows.

``tests/support.py`` defines the rows and runs them; ``tests/ops/test_ops.py`` runs every row in every mode.
"""
