"""This package owns HTTP, from sockets to replies. It knows nothing of prompts, of tensors and of the engine."""
