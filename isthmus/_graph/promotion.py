"""torch's rules for the dtypes of results, private names of torch.

Not in ``private.py``: their module imports sympy, which takes a quarter of a second, and ``import torch`` with Isthmus
installed imports ``private.py``. Lowerings alone need them, and load with the first tensor.
"""

from __future__ import annotations

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes as elementwise_dtypes

__all__ = ["Promotion", "elementwise_dtypes"]

# Every lowering asks for promotion, so a torch that changed it is noticed here, where the error says which name it is.
elementwise_dtypes(torch.empty(1, device="meta"), 2, type_promotion_kind=Promotion.DEFAULT)
