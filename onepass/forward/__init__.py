"""Tensors: rows to option scores. Knows nothing of the contract, of prompts and of HTTP."""
