"""``torch.compile(backend="isthmus")``: values, aliasing, mutation, shapes, random numbers, memory, passes, explain.

Results are compared with eager torch; ``isthmus.metrics`` and ``isthmus.explain`` say how many programs it took.
"""
