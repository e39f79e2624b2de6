"""An FFN that leaves its sum out, on two tensor-parallel ranks of vLLM over gloo: split equals unsplit on each rank.

Each rank plays both roles: its FFN role takes the sum, its attention role passes it on in parts, and upstream's next
norm takes the sum over those.
"""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

RANKS, HIDDEN, INNER, LAYERS = 2, 16, 32, 3


def build(rank: int, meeting: str) -> None:
    """Make this process one rank of two."""
    import os

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_CONFIGURE_LOGGING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    parallel_state.init_distributed_environment(RANKS, rank, f"file://{meeting}", rank, "gloo")
    parallel_state.initialize_model_parallel(RANKS, 1)


def mlp(reduce_results: bool, layer: int) -> nn.Module:
    """vLLM's own parallel layers, with the same random weights whoever builds them."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    class Mlp(nn.Module):
        def __init__(self, reduce_results: bool = True) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(HIDDEN, INNER, bias=False)
            self.down = RowParallelLinear(INNER, HIDDEN, bias=False, reduce_results=reduce_results)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(torch.relu(self.up(x)[0]))[0]
            return result

    made = Mlp(reduce_results=reduce_results)
    generator = torch.Generator().manual_seed(layer)
    for parameter, shape in ((made.up.weight, (INNER, HIDDEN)), (made.down.weight, (HIDDEN, INNER))):
        parameter.weight_loader(parameter, torch.randn(shape, generator=generator) / 4)
    for linear in (made.up, made.down):
        linear.quant_method.process_weights_after_loading(linear)
    return made


def forward(ffns: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """As upstream's layers: the next norm takes the sum that the FFN left out."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    residual, hidden = x, torch.nn.functional.rms_norm(x, (HIDDEN,))
    for ffn in ffns:
        residual = residual + tensor_model_parallel_all_reduce(ffn(hidden))
        hidden = torch.nn.functional.rms_norm(residual, (HIDDEN,))
    return hidden


def run(rank: int, meeting: str, pipe: Connection) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        build(rank, meeting)
        pipe.send(results())


def results() -> tuple[list[list[float]], list[list[float]], bool]:
    """What this rank gets unsplit and split, and whether its part of the first sum is nothing."""
    from afd_runtime import link
    from afd_runtime.split import RemoteSum

    class Remote(RemoteSum):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.exchange(x)

    class InProcess:
        held = torch.empty(0)

        def send(self, x: torch.Tensor, extras: link.Extras, layer: int, opens_step: bool) -> None:
            del extras, opens_step
            self.held = role[layer](x)

        def recv(self, out: torch.Tensor, layer: int) -> None:
            del layer
            out.copy_(self.held)

    native = [mlp(reduce_results=False, layer=layer) for layer in range(LAYERS)]
    role = [mlp(reduce_results=True, layer=layer) for layer in range(LAYERS)]
    remote = [Remote(reduce_results=False) for _ in range(LAYERS)]
    for layer, module in enumerate(remote):
        module.layer = layer
    link.install(InProcess())
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    part = remote[0](x)
    return forward(native, x).tolist(), forward(list(remote), x).tolist(), bool((part == 0).all())


def test_split_equals_unsplit_on_two_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(rank, str(tmp_path / "meeting"), theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    told = []
    for pipe in pipes:
        assert pipe.poll(180), "a rank gave no result"
        told.append(pipe.recv())
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    for native, split, _ in told:
        assert split == native
    assert [nothing for _, _, nothing in told] == [False, True], "the first rank passes all, the other zeros"
