"""Export a ViT of transformers' and run it in a Python without torch, with batches of any size.

python examples/vit_export.py                # random weights, so nothing is downloaded
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import isthmus

# What runs elsewhere: JAX, numpy and the loader that lies beside the weights.
PROGRAM = """
import sys
sys.modules["torch"] = None  # an import of torch would raise

import numpy as np
from run import load

outputs = load(".")(np.load("images.npy"))
np.save("logits.npy", outputs["logits"])
"""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=5,
    )
    return ViTForImageClassification(config).eval()


def run_without_torch(folder: Path, images: np.ndarray) -> np.ndarray:
    """Return the logits of images, computed in another process that cannot import torch."""
    np.save(folder / "images.npy", images)
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=folder)
    return np.load(folder / "logits.npy")


def main() -> tuple[np.ndarray, np.ndarray]:
    """Return the logits without torch, and those of eager torch."""
    model, images = make_model(), torch.randn(3, 3, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        example = torch.randn(2, 3, 32, 32)
        isthmus.export(model, (example,), dynamic_shapes={"pixel_values": {0: "batch"}}, path=folder)
        for file in sorted(Path(folder).iterdir()):
            print(f"{file.name:20} {file.stat().st_size:8,} bytes")
        found = run_without_torch(Path(folder), images.numpy())
    wanted = model(images).logits.detach().numpy()
    print(f"logits of {len(found)} images differ from torch's by at most {np.abs(found - wanted).max():.1e}")
    return found, wanted


if __name__ == "__main__":
    main()
