"""``isthmus.generate``: transformers' ``model.generate(...)`` with its decoding loop on the device.

transformers prepares a call (options, ``generation_config``, masks, positions, logits processors) and then hands it to
a decoding loop that calls the model once a token from Python. It lets the caller bring another loop
(``custom_generate``), and ``_decode`` is one: it reads the prepared call and runs it as two programs
(``decoding.py``), one for the prompt and one ``lax.while_loop`` for all further tokens, in which the token is chosen,
the cache written and the end recognised. The host waits once, for the result::

    tokens = isthmus.generate(model, prompt, max_new_tokens=64)
    model.generate = functools.partial(isthmus.generate, model)   # the same for code that calls model.generate

What the loop cannot do as transformers does it (beams, streamers, caches with a window, processors that look at the
order of tokens) is refused before anything runs: tokens that differ silently would be worse.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isthmus._device.core import mode
from isthmus._device.torch_glue.private import has_forward_hooks
from isthmus.errors import IsthmusError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REFUSED = {
    "streamer": "the host sees no token before the last",
    "custom_generate": "it is one itself",
    "past_key_values": "it has a cache of its own",
    "inputs_embeds": "it takes tokens",
}
# What transformers passes to a loop and this one needs or may ignore: it has a cache of its own.
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "synced_gpus"}
_CACHES = (None, "dynamic", "static")


def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Continue rows of tokens by a causal model of transformers, with the loop over tokens on the device.

    The tokens are those of ``model.generate(inputs, **options)``, but for near ties, where programs round otherwise.
    The prompt's length and the total length are padded, so that calls of similar lengths share their programs.

    Arguments:
        model: a causal language model of transformers on "jax", in eval mode, whose layers all attend to every earlier
            token.
        inputs: the prompt's tokens, ``[rows, length]``; also as ``input_ids=``. Rows are padded on the left.
        generator: where sampling takes its random numbers from, instead of torch's own generator.
        options: those of ``model.generate``: ``attention_mask``, ``max_new_tokens``, ``min_new_tokens``,
            ``eos_token_id`` (a number or several), ``pad_token_id``, ``do_sample``, ``temperature``, ``top_k``,
            ``top_p``, ``min_p``, ``repetition_penalty``, ``num_return_sequences``, ``generation_config`` and others.
            One that the loop does not have raises ``isthmus.errors.IsthmusError``.

    Returns:
        The tokens of prompt and continuation, ``[rows, length]``, on the prompt's device; rows that ended early are
        filled with the padding token.

    Example:
        >>> import isthmus, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, bos_token_id=1, eos_token_id=None)
        >>> model = GPT2LMHeadModel(config).eval().to("jax")
        >>> prompt = torch.tensor([[5, 6, 7]], device="jax")
        >>> isthmus.generate(model, prompt, max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise IsthmusError(f"isthmus.generate takes no {name}: {why}; call model.generate")
    whole = getattr(type(model), "generate", None)
    if whole is None:
        raise IsthmusError(
            f"isthmus.generate: {type(model).__name__} has no generate(); it is for causal language models of "
            f"transformers"
        )
    _check_place(model)
    prompt = inputs if inputs is not None else options.get("input_ids")
    device = model.device if prompt is None else prompt.device
    # On the CPU transformers prepares the call in numbers; on the device it would compile an op for every shape.
    options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    inputs = None if inputs is None else inputs.cpu()
    decode = functools.partial(_decode, generator=generator)
    # Of the class: the model's own attribute may be this function, bound to the model.
    return whole(model, inputs, custom_generate=decode, **options).to(device)  # type: ignore[no-any-return]


def _check_place(model: nn.Module) -> None:
    """Raise unless a model can be run by a program that was traced earlier."""
    elsewhere = {str(t.device) for t in (*model.parameters(), *model.buffers()) if t.device.type != "jax"}
    if elsewhere:
        raise IsthmusError(
            f'isthmus.generate: the model is on {", ".join(sorted(elsewhere))}; move it, model.to("jax")'
        )
    if model.training:
        raise IsthmusError(
            "isthmus.generate: the model is in train mode, where it drops values; call model.eval()"
        )
    hooked = [name for name, module in model.named_modules() if has_forward_hooks(module)]
    if hooked:
        raise IsthmusError(
            f"isthmus.generate: {hooked[0] or 'the model'} has a forward hook, whose Python would run once, when the "
            f"program is traced, and not for each token; remove it, or call model.generate"
        )
    if mode.current.capture is not None:
        raise IsthmusError("isthmus.generate inside isthmus.jit: it is a program of its own, call it outside")


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list[Any],
    stopping_criteria: list[Any],
    generation_config: Any,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Be the decoding loop of a call that transformers has prepared; the tokens are on the CPU."""
    # ``decoding`` imports transformers, which the caller has imported by now.
    from isthmus._interop import decoding, token_choice

    _check_config(generation_config)
    # What the model would be passed and the loop does not know.
    unknown = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN)
    if unknown:
        raise IsthmusError(
            f"isthmus.generate cannot pass {', '.join(unknown)} to the model; call model.generate"
        )
    length, ends = token_choice.stops(stopping_criteria)
    request = decoding.Request(
        tokens=input_ids,
        mask=model_kwargs.get("attention_mask"),
        positions=model_kwargs.get("position_ids"),
        length=length,
        ends=ends,
        padding=generation_config._pad_token_tensor,
        chooser=token_choice.Chooser(logits_processor, bool(generation_config.do_sample)),
        generator=generator,
    )
    return decoding.decoder_of(model).run(request)


def _check_config(config: Any) -> None:
    """Raise for settings that ask for another kind of loop or result."""
    kind = str(config.get_generation_mode().value)
    if kind not in ("greedy_search", "sample"):
        raise IsthmusError(f"isthmus.generate is greedy or samples; {kind} is model.generate's alone")
    if config.return_dict_in_generate:
        raise IsthmusError(
            "isthmus.generate returns tokens alone; return_dict_in_generate is model.generate's"
        )
    if config.cache_implementation not in _CACHES:
        raise IsthmusError(
            f"isthmus.generate has a cache of its own, not cache_implementation={config.cache_implementation!r}"
        )
