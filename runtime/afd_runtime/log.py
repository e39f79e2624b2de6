"""Loggers below vLLM's own, so that they follow its level, format and rank prefix."""

import logging


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"vllm.{name}")
