"""One step of the FFN role as a module, compiled by the same vLLM machinery as an unsplit model."""

from typing import Any

import torch
from vllm.compilation.decorators import support_torch_compile

from afd_runtime import ops
from afd_runtime.split import FFNLayer, FFNModel, find_layers


@support_torch_compile(dynamic_arg_dims={"tokens_like": 0})
class FFNStep(torch.nn.Module):
    """Every split layer in order: receive, compute, send. Follows vLLM's CompilationConfig; eager if that says so."""

    def __init__(self, *, model: FFNModel, vllm_config: Any) -> None:
        super().__init__()
        del vllm_config  # for the decorator
        layers = find_layers(model, FFNLayer)
        self.numbers = tuple(layers)
        self.layers = torch.nn.ModuleList(layers.values())
        self.hidden = model.afd_hidden_size
        self.dtype = model.afd_dtype

    def forward(self, tokens_like: torch.Tensor) -> torch.Tensor:
        """[tokens] of any content, on the model's device; returns the ticket of the last hop."""
        ticket = tokens_like.new_empty(0)
        for number, layer in zip(self.numbers, self.layers, strict=True):
            received = ops.recv(ticket, tokens_like.shape[0], self.hidden, self.dtype, number)
            ticket = ops.send(layer(received), number)
        return ticket
