"""The FFN role's worker: the platform's own, which serves steps once it is warm."""

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from afd_runtime.workers import platform_worker

if TYPE_CHECKING:
    from afd_runtime.ffn_loop import FFNLoop

_PlatformWorker: Any = resolve_obj_by_qualname(platform_worker(current_platform.device_type))


class FFNWorker(_PlatformWorker):
    """Holds the FFN loop. Requests never come here: they are refused when they arrive (`afd_runtime.refuse`)."""

    _afd_loop: "FFNLoop | None" = None

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        from afd_runtime.ffn_loop import FFNLoop

        self._afd_loop = FFNLoop(self.vllm_config, self.model_runner.get_model(), self.model_runner.device)
        self._afd_loop.start()
        return result

    def shutdown(self) -> None:
        if self._afd_loop is not None:
            self._afd_loop.stop()
        super().shutdown()
