"""The variables that the server reads."""

from __future__ import annotations

from onepass.config import API_KEY_VARIABLE, ENVIRONMENT_PREFIX, _flags

VARIABLES = {API_KEY_VARIABLE} | {ENVIRONMENT_PREFIX + item.name.upper() for item in _flags()}
