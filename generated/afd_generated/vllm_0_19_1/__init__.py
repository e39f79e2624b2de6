"""Wrappers for vLLM 0.19.1, written by afd-compile."""
