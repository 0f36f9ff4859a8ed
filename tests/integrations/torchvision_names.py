"""Lets the torchvision of PyPI be imported beside a torch for the CPU.

That wheel is linked with CUDA, so its own ops are not loaded here, and its import fails at the first of them that it
describes. With those names defined the parts in Python work, which timm and transformers import; its ops raise.
Wheels of torchvision for the CPU are on PyTorch's own index.
"""

import importlib.metadata
import importlib.util

import torch

HERE = torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None
if HERE and "+cpu" not in importlib.metadata.version("torchvision"):
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
