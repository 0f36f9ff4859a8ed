"""Language: models, adapters, embeddings, parts of transformers."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.programs import program, seeded, trained

WORDS = torch.arange(24).reshape(2, 12) * 7 % 50


def llama(**more: Any) -> Any:
    """Return a tiny Llama with the weights of a seed."""
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **more,
        )
    )  # fmt: skip


@program("transformers", "Llama: three steps of training, greedy and beam generation")
def transformers_llama(device: str) -> Any:
    model = llama().to(device)
    words = WORDS.to(device)
    losses = trained(model, lambda: model(input_ids=words, labels=words).loss)
    model.eval()
    greedy = model.generate(words[:, :6], max_new_tokens=6, do_sample=False, eos_token_id=None)
    beams = model.generate(words[:, :6], max_new_tokens=5, num_beams=3, do_sample=False, eos_token_id=None)
    return losses, greedy, beams


@program("transformers", "BERT, T5, Mamba and Mixtral, small: forward and a gradient")
def transformers_models(device: str) -> Any:
    import transformers as t

    small = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    t5 = {"vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    t5["decoder_start_token_id"] = 0
    made = [
        (t.BertForMaskedLM, t.BertConfig(**small), {}),
        (t.T5ForConditionalGeneration, t.T5Config(**t5), {}),
        (t.MambaForCausalLM, t.MambaConfig(vocab_size=50, hidden_size=32, state_size=4, num_hidden_layers=2), {}),
        (t.MixtralForCausalLM, t.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4), {}),
    ]  # fmt: skip
    results = []
    for kind, config, more in made:
        torch.manual_seed(0)
        model = kind(config).to(device).eval()
        out = model(input_ids=WORDS.to(device), labels=WORDS.to(device), **more)
        out.loss.backward()
        results += [out.logits, out.loss, next(p.grad for p in model.parameters() if p.grad is not None)]
    return results


@program("transformers", "Trainer, twenty steps in bfloat16", 2**-8, "ISTHMUS_LIBRARIES=on")
def transformers_trainer(device: str) -> Any:
    import tempfile

    import transformers

    data = [{"input_ids": row, "labels": row} for row in WORDS.repeat(20, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=20, logging_steps=1, bf16=True, use_cpu=device == "cpu",
        per_device_train_batch_size=2, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(llama(), arguments, train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return torch.tensor(losses, device=trainer.model.device)


@program(
    "accelerate",
    "Accelerator(), ten steps, gradients accumulated and clipped",
    settings="ISTHMUS_LIBRARIES=on",
)
def accelerate_loop(device: str) -> Any:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(list(seeded(20, 6)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


@program("peft", "LoRA, IA3 and DoRA on a Llama: three steps, merged weights")
def peft_adapters(device: str) -> Any:
    import peft

    results = []
    for config in (
        peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4),
        peft.LoraConfig(target_modules=["q_proj"], r=4, use_dora=True),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ):
        model = peft.get_peft_model(llama(), config)
        torch.manual_seed(0)
        model.to(device)
        words = WORDS.to(device)
        results += trained(model, lambda m=model, w=words: m(input_ids=w, labels=w).loss)
        merged = model.merge_and_unload()
        results.append(merged(input_ids=words).logits)
    return results


@program("sentence-transformers", "encode with a pooled BERT, device given; a contrastive loss")
def sentence_transformers_encode(device: str) -> Any:
    return _sentences(device, {"device": device})


@program("sentence-transformers", "encode, the device found by the library", settings="ISTHMUS_LIBRARIES=on")
def sentence_transformers_found(device: str) -> Any:
    return _sentences(device, {} if device == "jax" else {"device": device})


def _sentences(device: str, where: dict[str, str]) -> Any:
    import tempfile

    import sentence_transformers
    import transformers
    from sentence_transformers import models
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as tokenizer_models

    words = Tokenizer(tokenizer_models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0", model_max_length=16
    )
    torch.manual_seed(0)
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
    )
    folder = tempfile.mkdtemp()
    bert.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reader = models.Transformer(folder)
    model = sentence_transformers.SentenceTransformer(modules=[reader, models.Pooling(32)], **where)
    vectors = model.encode(["w1 w2 w3", "w4 w5", "w1 w9 w3 w4"], convert_to_tensor=True)
    near = sentence_transformers.util.semantic_search(vectors[:1], vectors[1:], top_k=2)[0]
    return vectors, sentence_transformers.util.cos_sim(vectors, vectors), [hit["corpus_id"] for hit in near]


@program("x-transformers", "a decoder with rotary positions, three steps, generation")
def x_transformers_decoder(device: str) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    model = TransformerWrapper(
        num_tokens=50, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
    ).to(device)
    words = WORDS.to(device)
    loss = lambda: torch.nn.functional.cross_entropy(model(words).transpose(1, 2), words)  # noqa: E731
    return trained(model, loss), model(words)


@program("rotary-embedding-torch", "rotated queries")
def rotary(device: str) -> Any:
    from rotary_embedding_torch import RotaryEmbedding

    return RotaryEmbedding(dim=8).to(device).rotate_queries_or_keys(seeded(1, 2, 6, 16).to(device))


@program("local-attention", "causal windows and gradients")
def local_attention(device: str) -> Any:
    from local_attention import LocalAttention

    torch.manual_seed(0)
    layer = LocalAttention(dim=8, window_size=4, causal=True).to(device)
    q = seeded(2, 2, 16, 8).to(device).requires_grad_()
    out = layer(q, seeded(2, 2, 16, 8).to(device), seeded(2, 2, 8, 16).reshape(2, 2, 16, 8).to(device))
    out.square().sum().backward()
    return out, q.grad


@program("vector-quantize-pytorch", "codes, losses, EMA of the codebook")
def vector_quantize(device: str) -> Any:
    from vector_quantize_pytorch import VectorQuantize

    torch.manual_seed(0)
    layer = VectorQuantize(dim=8, codebook_size=16, decay=0.8).to(device)
    quantized, codes, loss = layer(seeded(2, 10, 8).to(device))
    return quantized, codes, loss, layer.codebook


@program("entmax", "sparsemax, entmax 1.5 and gradients")
def entmax_functions(device: str) -> Any:
    import entmax

    x = seeded(4, 9).to(device).requires_grad_()
    a, b = entmax.sparsemax(x, dim=-1), entmax.entmax15(x, dim=-1)
    (a.square().sum() + b.pow(3).sum()).backward()
    return a, b, x.grad


@program("trl", "log probabilities of chosen tokens")
def trl_log_probabilities(device: str) -> Any:
    from trl.trainer.utils import selective_log_softmax

    logits = llama().to(device).eval()(input_ids=WORDS.to(device)).logits
    return selective_log_softmax(logits, WORDS.to(device))


@program("torchao", "int8 weights and 8-bit AdamW")
def torchao_quantized(device: str) -> Any:
    from torchao.optim import AdamW8bit
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    inputs = seeded(4, 64).to(device)
    losses = trained(
        model, lambda: model(inputs).square().mean(), optimizer=AdamW8bit(model.parameters(), lr=1e-3)
    )
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        return losses, model(inputs)


@program("bitsandbytes", "8-bit layers in eval mode, with outliers too; 4-bit layers; gradients", 1e-3)
def bitsandbytes_layers(device: str) -> Any:
    import bitsandbytes as bnb

    inputs = seeded(4, 64)
    inputs[:, 3] *= 9
    results = []

    def through(layer: Any, dtype: torch.dtype) -> None:
        x = inputs.to(dtype).to(device).clone().requires_grad_()
        out = layer.to(device)(x)
        out.float().square().sum().backward()
        results.extend([out, x.grad])

    for threshold in (0.0, 6.0):
        torch.manual_seed(0)
        # In training the library takes another way on the CPU than on all other devices: it quantizes weights alone.
        layer = bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False, threshold=threshold).eval()
        through(layer, torch.float16)
    for kind in ("nf4", "fp4"):
        torch.manual_seed(0)
        through(bnb.nn.Linear4bit(64, 32, quant_type=kind, compute_dtype=torch.float32), torch.float32)
    return results


@program("bitsandbytes", "8-bit AdamW and Lion")
def bitsandbytes_optimizers(device: str) -> Any:
    import bitsandbytes as bnb

    results = []
    for kind in (bnb.optim.AdamW8bit, bnb.optim.Lion8bit):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 128).to(device)
        inputs = seeded(4, 64).to(device)
        optimizer = kind(model.parameters(), lr=1e-2)
        results += trained(model, lambda m=model, x=inputs: m(x).square().mean(), optimizer=optimizer)
        results.append(model.weight)
    return results
