"""Ops against CPU torch: every case of tests/cases/ in every mode, torch's op_db, dtypes, promotion, random numbers."""
