"""The contract: bytes to a `Request`, scores to the bytes of an answer. It knows nothing of HTTP and the model."""
