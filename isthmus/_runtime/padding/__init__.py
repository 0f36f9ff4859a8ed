"""One program for a range of sizes: functions traced for symbolic sizes, run on arrays that are padded.

A program compiled for the shape (4, 37) is of no use for (4, 38). Here a function is traced once for (4, s), with the
symbolic dimensions of ``jax.export``, and its jaxpr is run on arrays that are padded to the next size of a grid (a
bucket), so that one executable serves every ``s`` up to 40. The true sizes are one more input of it.

- A symbolic size in a *shape* stands for the padded size; JAX marks every place where it is a *value* (the divisor of a
  mean, the end of an ``arange``) with the primitive ``dim_as_value``, which yields the true size at run time.
- What lies past the true size is unspecified. Before a primitive reads across such an axis, its rule puts the
  neutral element there: zeros for a sum or a product of matrices, the smallest value for a maximum.
- A primitive without a rule is refused (``Refused``): the caller compiles that size exactly. So does a function
  that branches on a size, which JAX refuses while tracing.

Results equal those of the exact program up to the order of float additions; no padding value reaches them, and random
numbers are the same bits.

========================  ==========================================================================================
``sizes.py``              symbols, their ranges, the grid of padded sizes
``layout.py``             padded arrays: which parts an axis consists of, masks, changes of layout
``interpreter.py``        runs a jaxpr on padded arrays; the table of rules
``wanted_zeros.py``       which values get zeros for padding where they are computed, to save masks later
``rules/``                what each primitive does to padding, a file per family
``program.py``            ``PaddedProgram``: one trace, one executable per set of padded sizes
========================  ==========================================================================================

No module here knows torch; lazy mode and others trace their lowerings with it.
"""
