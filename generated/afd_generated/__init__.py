"""Wrappers written by afd-compile, one folder per vLLM release."""
