"""The FFN role's daemon: wait for an Attention, serve its steps, and start over when it is gone."""

import threading
from typing import Any

import torch

from afd_runtime import link
from afd_runtime.connectors import make_connector
from afd_runtime.errors import HandshakeError, WireError
from afd_runtime.ffn_step import FFNStep
from afd_runtime.header import Extra, parse_header
from afd_runtime.log import init_logger
from afd_runtime.split import FFNModel

logger = init_logger(__name__)


class FFNLoop:
    """Serves in a thread of its own. `start` returns once the step has run on dummy data."""

    def __init__(self, vllm_config: Any, model: FFNModel, device: torch.device) -> None:
        self._vllm_config = vllm_config
        self._device = device
        self._max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._tokens_like = torch.zeros(self._max_tokens, dtype=torch.int8, device=device)
        self._model = model
        self._steps: dict[tuple[Extra | None, ...], FFNStep] = {}
        self._prepared = link.prepared()
        self._connector = make_connector(self._prepared.config)
        self._stop = threading.Event()
        self._warm = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="afd-ffn-loop", daemon=True)

    def start(self) -> None:
        """Raise what the address or the warm-up raises."""
        self._connector.listen()
        self._thread.start()
        self._warm.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the session and the thread."""
        self._stop.set()
        self._connector.close()
        self._thread.join(timeout=5)

    @torch.inference_mode()
    def _run(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)
        try:
            self._warm_up()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._warm.set()
        while not self._stop.is_set():
            self._session()

    def _warm_up(self) -> None:
        """Compile, if the configuration says so, and run the step at both ends of its range, in the serving thread."""
        from vllm.config import set_current_vllm_config

        link.install(link.Loopback())
        with set_current_vllm_config(self._vllm_config):
            for tokens in (self._max_tokens, 1):
                self._compute(tokens, self._model.usual_extras())

    def _step(self, extras: tuple[Extra | None, ...]) -> FFNStep:
        """The module for steps with such extras; made when they first come."""
        from vllm.config import set_current_vllm_config

        if extras not in self._steps:
            with set_current_vllm_config(self._vllm_config):
                self._steps[extras] = FFNStep(model=self._model, vllm_config=self._vllm_config, extras=extras)
        return self._steps[extras]

    def _session(self) -> None:
        config = self._prepared.config
        logger.info("afd: the FFN role waits for the attention role at %s:%d", config.host, config.port)
        try:
            if not self._connector.connect(self._prepared.facts, self._stop):
                return
            logger.info("afd: the attention role is connected")
            link.install(link.FFNLink(self._connector))
            self._serve()
        except HandshakeError as error:
            logger.error("afd: refused: %s", error)
        except WireError as error:
            if not self._stop.is_set():
                logger.warning("afd: session over: %s", error)
        except Exception:
            logger.exception("afd: the step failed; the session is closed")
        finally:
            self._connector.close()

    def _serve(self) -> None:
        sequence = 0
        while not self._stop.is_set():
            expected = len(self._model.afd_extras)
            header = parse_header(self._connector.recv_header(), sequence, self._max_tokens, expected)
            self._compute(header.tokens, header.extras)
            sequence += 1

    def _compute(self, tokens: int, extras: tuple[Extra | None, ...]) -> None:
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, self._vllm_config, num_tokens=tokens):
            self._step(extras)(self._tokens_like[:tokens])
