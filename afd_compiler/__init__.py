"""Compiler of Attention-FFN splits: reads a vLLM source tree, decides, proves, writes."""

__version__ = "0.1.0"
