"""This package is the contract: it turns bytes into a `Request`, and scores into the bytes of an answer.

It knows nothing of HTTP and of the model.
"""
