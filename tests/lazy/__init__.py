"""Lazy mode and ``isthmus.jit``: what is recorded, when it runs, guards, replays, errors, memory, recompilations.

``helpers.py`` has the fixture for lazy mode and the functions put under jit; ``test_training.py`` trains in both.
"""
