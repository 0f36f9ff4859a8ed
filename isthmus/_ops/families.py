"""Importing this module registers every lowering: each module in this folder is a family or a helper."""

import importlib
import pkgutil

import isthmus._ops

for _module in sorted(m.name for m in pkgutil.walk_packages(isthmus._ops.__path__, "isthmus._ops.")):
    if _module != __name__:
        importlib.import_module(_module)
