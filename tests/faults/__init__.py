"""What goes wrong in the middle: interrupts, failed compilations, no memory, threads, damaged files, killed saves.

``injector.py`` raises at the n-th event of a kind, ``training.py`` is the run that is disturbed, ``saving.py`` forks
processes that die while they save, ``places.py`` and ``situations.py`` raise inside backward passes.
"""
