"""Answers requests to the FFN role's HTTP port: vLLM asks each logits processor before it queues a request."""

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

TEXT = "this is the FFN role of an AFD deployment; send requests to the attention server"


class RefuseRequests(LogitsProcessor):
    """Admits nothing, so the rest of it never runs on a request."""

    @classmethod
    def validate_params(cls, sampling_params: object) -> None:
        raise ValueError(TEXT)

    def __init__(self, *_: object) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: object) -> None:
        pass
