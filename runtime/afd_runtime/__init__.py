"""Runtime of AFD: runs inside an unmodified vLLM as its attention or its FFN role."""
