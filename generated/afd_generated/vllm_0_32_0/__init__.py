"""Wrappers for vLLM 0.32.0, written by afd-compile."""
