"""The commands of `python -m onepass`, a file each."""
