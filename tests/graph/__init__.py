"""The graph that lazy mode records, which knows no JAX: nodes, passes, splitting, the reference backend and others."""
