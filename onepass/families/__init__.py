"""The formats in which decision checkpoints are published: which one a folder has, and whether it can be served."""
