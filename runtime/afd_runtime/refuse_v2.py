"""The same refusal (`afd_runtime.refuse`) for vLLM's v2 model runner, which has another logits-processor class."""

from typing import Any

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from afd_runtime.refuse import TEXT


class RefuseRequests(LogitsProcessor):
    """Admits nothing, so the rest of it never runs on a request."""

    @classmethod
    def validate_params(cls, sampling_params: object) -> None:
        raise ValueError(TEXT)

    def apply(self, logits: Any, ctx: object) -> Any:
        return logits
