"""Wrappers for vLLM 0.26.0, written by afd-compile."""
