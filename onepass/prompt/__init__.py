"""This package turns a `Request` into prompt rows: text, tokens, and the positions that are read.

It knows nothing of the model and of HTTP.
"""
