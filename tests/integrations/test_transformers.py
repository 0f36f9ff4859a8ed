"""transformers' Trainer and pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.support import GPT, need, ran

pytestmark = [need("accelerate", "transformers"), pytest.mark.slow]

TRAIN = (
    GPT
    + """
def arguments(**more):
    return transformers.TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=4, logging_steps=1, report_to=[], disable_tqdm=True, seed=5,
        max_steps=20, learning_rate=3e-3, **more,
    )
"""
)
LOSSES = (
    TRAIN
    + """
args = arguments(bf16=sys.argv[2] == "bf16", use_cpu=sys.argv[3] == "cpu", save_strategy="no")
trainer = transformers.Trainer(gpt(), args, train_dataset=DATA)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print()
print(json.dumps([args.device.type, trainer.model.device.type, losses]))
"""
)


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_twenty_steps_of_the_trainer(precision: str, tmp_path: Path) -> None:
    *places, losses = ran(LOSSES, "on", str(tmp_path), precision, "")
    assert places == ["jax", "jax"]
    *places, wanted = ran(LOSSES, "off", str(tmp_path), precision, "cpu")
    assert places == ["cpu", "cpu"]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(wanted, rel=2**-8 if precision == "bf16" else 1e-4)


def test_the_trainer_takes_the_cpu_unless_asked(tmp_path: Path) -> None:
    code = TRAIN + "print(json.dumps([arguments().device.type, 'jax' in sys.modules]))"
    assert ran(code, "auto", str(tmp_path)) == ["cpu", False]


def test_a_resumed_training_draws_what_the_first_drew(tmp_path: Path) -> None:
    code = (
        TRAIN
        + """
class Noisy(transformers.GPT2LMHeadModel):
    def forward(self, input_ids, labels, **more):
        loss = super().forward(input_ids=input_ids, labels=labels).loss
        return {"loss": loss * (1 + torch.rand((), device=input_ids.device))}

def run(resume):
    torch.manual_seed(2)
    trainer = transformers.Trainer(Noisy(gpt().config), arguments(save_steps=10), train_dataset=DATA)
    trainer.train(resume_from_checkpoint=resume)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]

first = run(None)
again = run(sys.argv[1] + "/checkpoint-10")
print()
print(json.dumps([first[10:], again[10:]]))
"""
    )
    first, again = ran(code, "on", str(tmp_path))
    assert len(first) == 10
    assert again == pytest.approx(first, rel=1e-6)


PIPELINE = (
    GPT
    + """
from transformers import PreTrainedTokenizerFast, pipeline
from tokenizers import Tokenizer, models, pre_tokenizers
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w63")
made = pipeline("text-generation", model=gpt().eval(), tokenizer=tokenizer)
text = made("w1 w2 w3", max_new_tokens=8, do_sample=False)[0]["generated_text"]
print(json.dumps([made.device.type, made.model.device.type, text]))
"""
)


def test_a_pipeline() -> None:
    *places, text = ran(PIPELINE, "on")
    assert places == ["jax", "jax"]
    assert [*ran(PIPELINE, "auto")] == ["cpu", "cpu", text]
