"""Matrix products, factorizations, solvers, distances."""
