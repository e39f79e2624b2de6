"""What an FFN role built around its layers, and never uses: vision towers, embeddings, what they need."""

import torch

from afd_runtime.split import FFNLayer, Unowned


def drop_surroundings(model: torch.nn.Module) -> None:
    """Put `Unowned` in the place of every module with parameters that is not in a layer, nor shared with one.

    Most of them are never built: names are bound to `Unowned`, and vLLM leaves out towers of a model that serves text
    only. What is left is upstream's own way of building a part that neither knows.
    """
    layers = [module for module in model.modules() if isinstance(module, FFNLayer)]
    _drop(model, {id(parameter) for layer in layers for parameter in layer.parameters()})


def _drop(module: torch.nn.Module, kept: set[int]) -> None:
    for name, child in module.named_children():
        if isinstance(child, FFNLayer):
            continue
        if any(isinstance(inner, FFNLayer) or id(inner) in kept for inner in (*child.modules(), *child.parameters())):
            _drop(child, kept)
        elif any(True for _ in child.parameters()):
            setattr(module, name, Unowned())
