"""HTTP: sockets to replies. Knows nothing of prompts, of tensors and of the engine."""
