"""What several test files share: servers, clients, checkpoints and fakes. No test imports another test file."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
