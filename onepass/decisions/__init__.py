"""From probabilities to decisions: labelled rows, how good the answers to them are, and the report.

It knows nothing of servers, files of answers or models: the commands ask, and hand over what was answered.
"""
