"""One step of the FFN role as a module, compiled by the same vLLM machinery as an unsplit model."""

from typing import Any

import torch
from vllm.compilation.decorators import support_torch_compile

from afd_runtime import ops
from afd_runtime.header import Extra
from afd_runtime.split import FFNLayer, FFNModel, find_layers


@support_torch_compile(dynamic_arg_dims={"tokens_like": 0})
class FFNStep(torch.nn.Module):
    """Every split layer in order: receive, compute, send. Follows vLLM's CompilationConfig; eager if that says so.

    `extras` say what comes with the hidden states in such a step; a step with others is another module.
    """

    def __init__(self, *, model: FFNModel, vllm_config: Any, extras: tuple[Extra | None, ...] = ()) -> None:
        super().__init__()
        del vllm_config  # for the decorator
        layers = find_layers(model, FFNLayer)
        self.numbers = tuple(layers)
        self.layers = torch.nn.ModuleList(layers.values())
        self.given = tuple(extra is not None for extra in extras)
        hidden = Extra(model.afd_dtype, model.afd_hidden_size)
        self.values = (hidden, *(extra for extra in extras if extra is not None))

    def forward(self, tokens_like: torch.Tensor) -> torch.Tensor:
        """[tokens] of any content, on the model's device; returns the ticket of the last hop."""
        ticket = tokens_like.new_empty(0)
        for number, layer in zip(self.numbers, self.layers, strict=True):
            hidden_states, *present = ops.recv_all(ticket, tokens_like.shape[0], self.values, number)
            extras = [present.pop(0) if given else None for given in self.given]
            ticket = ops.send(layer(hidden_states, *extras), number)
        return ticket
