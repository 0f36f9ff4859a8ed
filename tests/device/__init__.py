"""Tensors on device "jax" and torch around them: storages, views, mutation, transfers, dispatch, fallback, patches.

Also torch's databases of modules and optimizers (``test_modules.py``, ``test_optimizers.py``), wrong set-ups
(``test_setup.py``) and releases of torch and JAX that changed (``test_drift.py``, staged by ``drift.py``).
"""
