"""A `Request` to prompt rows: text, tokens and the positions that are read. Knows nothing of the model and of HTTP."""
