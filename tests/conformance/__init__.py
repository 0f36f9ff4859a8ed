"""torch's own databases of operators, modules and optimizers, run on the device against the CPU.

``kinds.py`` says what is done with one sample of an operator, ``trial.py`` does it on the CPU and on the device,
``values.py`` moves and compares values, ``verdict.py`` judges an entry by ``expectations.toml``, ``table.py``
writes the summary. A test file lists entries and says what is done with them.
"""
