"""This package holds the commands of `python -m onepass`, one in each file."""
