"""The parts of a Hugging Face model: its stack of layers, their attention, its head, and its logits."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ag.errors import UserError
from ag.model.geometry import attention_layers

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # of transformers: with it a model finds its attention function
USE_ANOTHER = "use a model such as Llama, Mistral, Qwen2 or Qwen3."


class UnsupportedModelError(UserError, TypeError):
    """A model class that cannot take a custom attention function."""


def unwrapped(model: Any) -> Any:
    """Return a model of transformers without the wrappers of ``torch.compile`` and PEFT."""
    model = getattr(model, "_orig_mod", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(model, "_orig_mod", model)


def decoder_of(model: nn.Module) -> Any:
    """Return the stack of layers inside a causal language model, through PEFT's wrapper.

    Raises:
        UnsupportedModelError: when there is none, or it does not use the attention interface.
        UserError: for something that is no model, for example a model's name.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model={model!r:.80}: expected a loaded model of transformers, such as that of model, tokenizer = "
            f"ag.load_base({(model if isinstance(model, str) else 'smollm2')!r})."
        )
    base = unwrapped(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    decoder = getattr(base, "model", base) if decoder is base else decoder  # Llama 4 does not find its own
    layers = getattr(decoder, "layers", ())
    if not (isinstance(base, PreTrainedModel) and any(attention_of(layer) is not None for layer in layers)):
        raise UnsupportedModelError(
            f"{type(base).__name__} has no layer that attends through the attention interface of transformers: "
            f"expected a decoder with such layers; {USE_ANOTHER}"
        )
    return decoder


def attention_of(layer: nn.Module) -> Any:
    """Return the module of a layer that attends through the attention interface; None where the layer has none."""
    return next((part for part in layer.children() if _calls_interface(_class_of(part))), None)


def attentions_of(decoder: Any) -> list[Any]:
    """Return the attention modules that make keys and values, in order, as gates and caches count layers."""
    return [attention_of(decoder.layers[index]) for index in attention_layers(decoder.config)]


def _class_of(module: nn.Module) -> Any:
    return type(getattr(module, "_orig_mod", module))  # of a compiled module too


@functools.cache
def _calls_interface(kind: Any) -> bool:
    """Whether some method of a class names the table of attention functions."""
    own = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    methods = [inspect.unwrap(part) for base in own for part in vars(base).values() if inspect.isfunction(part)]
    return any(INTERFACE in method.__code__.co_names for method in methods)


def own_config(module: Any) -> PretrainedConfig:
    """Return the model's configuration of an attention module."""
    config: PretrainedConfig = vars(module).get("_ag_own_config", module.config)
    return config


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module: of its weights, or of accelerate's hooks while these are offloaded."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    hook_devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in hook_devices if device is not None), "cpu"))


def lm_head(model: nn.Module) -> nn.Module:
    """Return the language model head."""
    head: nn.Module = unwrapped(model).get_output_embeddings()
    return head


def lm_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Compute the logits of final hidden states ``[..., d]`` as the model does, with its scales and its soft cap.

    The model's own forward pass runs on a shallow copy that has the states in place of the stack of layers.
    """
    base, decoder = unwrapped(model), decoder_of(model)
    states = hidden.reshape(1, -1, hidden.shape[-1])
    child = next(name for name, part in base.named_children() if any(module is decoder for module in part.modules()))
    head_only = copy.copy(base)
    head_only._modules = base._modules | {child: _GivenStates(states, base._modules[child])}
    out = type(base).forward(head_only, inputs_embeds=states, use_cache=False, return_dict=True)
    logits: Tensor = out.logits
    return logits.view(*hidden.shape[:-1], logits.shape[-1])


def end_tokens(model: nn.Module, eos: int | None) -> set[int]:
    """Return the tokens that end a text: the tokenizer's ``eos``, and the model's by its generation settings."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return {token for token in (eos, *(named if isinstance(named, list) else [named])) if token is not None}


class _GivenStates:
    """Stands for a stack of layers, and returns given states: it is its own output, without other fields.

    Args:
        states: final hidden states.
        stack: what it stands for, whose factors the head reads (Falcon-H1).
    """

    def __init__(self, states: Tensor, stack: nn.Module | None) -> None:
        self.last_hidden_state, self._stack = states, stack

    def __call__(self, *args: Any, **kwargs: Any) -> _GivenStates:
        return self

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stack, name, None)
