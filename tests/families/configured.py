"""Families of the transformers library, built from configurations as small as they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.families.family import Batch, Family, adamw, classes, tokens

_SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_SIZES, "intermediate_size": 64, "max_position_embeddings": 32}
_ENCODER = {**_DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# Hooks that record hidden states are put in under a lock, and the encoder's input is told to need a gradient.
_RECORDING = (
    "Unsupported context manager",
    "setattr() on unsupported type",
    "setattr() on Tensor.requires_grad",
    "Unsupported method call",
)
# Whether a layer is left out is decided in Python by a random tensor, even where none ever is.
_LAYERDROP = ("Data-dependent branching",)


def _build(name: str, **options: Any) -> nn.Module:
    """Return a model of the library with random weights."""
    import transformers  # takes seconds, which only those who run these families should wait

    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def _text(g: torch.Generator) -> Batch:
    """Return text whose second row is padded."""
    text, mask = tokens((2, 10), g), torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": text, "attention_mask": mask, "labels": text.masked_fill(mask == 0, -100)}


def _plain_text(g: torch.Generator) -> Batch:
    text = tokens((2, 10), g)
    return {"input_ids": text, "labels": text}


def _translation(g: torch.Generator) -> Batch:
    return {"input_ids": tokens((2, 9), g), "labels": tokens((2, 6), g)}


def _photos(g: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g), "labels": classes(5, 2, g)}


def _spectrum(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": tokens((2, 6), g)}


def _waves(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 400, generator=g), "labels": classes(5, 2, g)}


def _captions(g: torch.Generator) -> Batch:
    photos = torch.randn(3, 3, 32, 32, generator=g)
    return {"input_ids": tokens((3, 8), g), "pixel_values": photos, "return_loss": True}


def _gpt2() -> nn.Module:
    model = _build(
        "GPT2LMHeadModel",
        vocab_size=100,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    model.loss_type = (
        "ForCausalLM"  # else the library logs that it guesses, and Dynamo breaks the graph there
    )
    return model


def _decoder(name: str, **options: Any) -> nn.Module:
    return _build(name, **{**_DECODER, "use_cache": False, **options})


def _distilbert() -> nn.Module:
    return _build(
        "DistilBertForMaskedLM",
        vocab_size=100,
        max_position_embeddings=32,
        dim=32,
        hidden_dim=64,
        n_layers=2,
        n_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
    )


def _t5() -> nn.Module:
    return _build(
        "T5ForConditionalGeneration",
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )


def _encoder_decoder(name: str, **options: Any) -> nn.Module:
    sizes = {
        "vocab_size": 100,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    }
    drops = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "use_cache": False}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return _build(name, **sizes, **drops, **special, **options)


def _vision(name: str, **options: Any) -> nn.Module:
    return _build(name, image_size=32, num_labels=5, **options)


def _clip() -> nn.Module:
    text = {**_DECODER, "projection_dim": 16, "bos_token_id": 98, "eos_token_id": 99}
    vision = {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    return _build("CLIPModel", text_config=text, vision_config=vision, projection_dim=16)


def _wav2vec2() -> nn.Module:
    return _build(
        "Wav2Vec2ForSequenceClassification",
        **_DECODER,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        num_labels=5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,  # draws its masks with NumPy
    )


def _mamba() -> nn.Module:
    return _build(
        "MambaForCausalLM",
        vocab_size=100,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


CONFIGURED = [
    Family("BERT", lambda: _build("BertForMaskedLM", **_ENCODER), _text, quick=True),
    Family("DistilBERT", _distilbert, _text),
    Family("ALBERT", lambda: _build("AlbertForMaskedLM", **_ENCODER, embedding_size=16), _text),
    Family("ELECTRA", lambda: _build("ElectraForMaskedLM", **_ENCODER, embedding_size=16), _text),
    Family(
        "DeBERTa-v2",
        lambda: _build(
            "DebertaV2ForMaskedLM",
            **_ENCODER,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
        ),
        _text,
    ),
    Family("GPT-2", _gpt2, _text, quick=True),
    Family("GPT-NeoX", lambda: _decoder("GPTNeoXForCausalLM", hidden_dropout=0.0), _text),
    Family("Llama", lambda: _decoder("LlamaForCausalLM", num_key_value_heads=2), _text, adamw, quick=True),
    Family(
        "Mistral",
        lambda: _decoder("MistralForCausalLM", num_key_value_heads=2, sliding_window=4),
        _text,
    ),
    Family(
        "Mixtral",
        lambda: _decoder(
            "MixtralForCausalLM",
            num_key_value_heads=2,
            num_local_experts=4,
            # The library's other way of running experts reads their sizes on the host in backward.
            experts_implementation="batched_mm",
        ),
        _text,
    ),
    Family("Qwen2", lambda: _decoder("Qwen2ForCausalLM", num_key_value_heads=2), _text),
    Family("Gemma", lambda: _decoder("GemmaForCausalLM", num_key_value_heads=1, head_dim=8), _text),
    Family("T5", _t5, _translation),
    Family(
        "BART",
        lambda: _encoder_decoder("BartForConditionalGeneration", max_position_embeddings=32),
        _translation,
        breaks=_LAYERDROP,
    ),
    Family(
        "Whisper",
        lambda: _encoder_decoder(
            "WhisperForConditionalGeneration",
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
        ),
        _spectrum,
        breaks=_LAYERDROP,
    ),
    Family(
        "ViT",
        lambda: _vision(
            "ViTForImageClassification",
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
        ),
        _photos,
    ),
    Family(
        "Swin",
        lambda: _vision(
            "SwinForImageClassification",
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            drop_path_rate=0.0,
        ),
        _photos,
    ),
    Family(
        "ConvNeXt",
        lambda: _vision("ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
        _photos,
    ),
    Family("CLIP", _clip, _captions),
    Family("Wav2Vec2", _wav2vec2, _waves, breaks=(*_LAYERDROP, *_RECORDING)),
    Family("Mamba", _mamba, _plain_text),
]
