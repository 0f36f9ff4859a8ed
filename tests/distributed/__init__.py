"""Ranks: ``torch.distributed`` on device "jax", two or four processes on this machine.

``launch.py`` starts the processes and collects what each check said; ``collectives.py``, ``training.py`` and so on are
what they run. Results are compared with one process on the CPU.
"""
