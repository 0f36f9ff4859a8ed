"""Fine-tune a tiny Llama of transformers' with LoRA on "jax", each step one XLA program.

python examples/lora_llama.py                # random weights, so nothing is downloaded
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import isthmus

RANK, STEPS = 8, 40


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, zero at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def add_lora(model: nn.Module) -> None:
    """Freeze a model and put LoRA around the queries and values of its attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ("q_proj", "v_proj") and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child))


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def main() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses, and the frozen weights before and after."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    add_lora(model)
    model.to("jax")
    first = torch.arange(0, 32, 8)[:, None]
    tokens = (first + torch.arange(32)).to("jax")  # it is to learn to count

    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before = {name: p.cpu() for name, p in frozen.items()}
    total = sum(p.numel() for p in model.parameters())
    print(f"{sum(p.numel() for p in trained):,} of {total:,} parameters are trained")

    step = isthmus.train_step(model, loss_fn, torch.optim.AdamW(trained, lr=3e-2))
    losses = [step(tokens).item() for _ in range(STEPS)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")

    after = {name: p.cpu() for name, p in frozen.items()}
    print(f"frozen weights unchanged: {all(torch.equal(before[name], after[name]) for name in before)}")
    return losses, before, after


if __name__ == "__main__":
    main()
