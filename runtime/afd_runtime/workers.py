"""Worker classes by device type."""

from afd_runtime.errors import AFDConfigError

FFN_WORKER = "afd_runtime.ffn_worker.FFNWorker"

PLATFORM_WORKERS = {
    "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
    "cuda": "vllm.v1.worker.gpu_worker.Worker",
    "npu": "vllm_ascend.worker.worker.NPUWorker",
}


def platform_worker(device_type: str) -> str:
    """Qualified name of the worker that the FFN role derives from."""
    if device_type not in PLATFORM_WORKERS:
        raise AFDConfigError(
            f"afd: no FFN worker for device type {device_type!r}; known are {', '.join(PLATFORM_WORKERS)}"
        )
    return PLATFORM_WORKERS[device_type]
