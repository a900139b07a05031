"""What every test needs: no network, and small checkpoints made on the spot."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub libraries
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["GOMP_SPINCOUNT"] = "1000"  # as the server does

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from engine import Engine
from onepass.forward.batches import CostModel
from tests.support.checkpoints import make_chat_checkpoint, make_decision_checkpoint, make_vision_checkpoint
from tests.support.live import Server

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture(scope="session", autouse=True)
def given_costs() -> Iterator[None]:
    """What a pass costs is measured, and other tests are what else runs meanwhile: in this process it is given.

    The servers that tests start in processes of their own measure."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_measure", lambda *_: CostModel(launch=64, per_token=1))
        yield


@pytest.fixture(scope="session")
def chat_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model that knows nothing of decisions."""
    return make_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def labels_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Readout `labels`, with a template for each encoding."""
    return make_decision_checkpoint(tmp_path_factory.mktemp("labels"))


@pytest.fixture(scope="session")
def vision_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vision tower."""
    return make_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="session")
def seeing(vision_checkpoint: Path) -> Iterator[Server]:
    """A server that takes pictures."""
    with Server("--model", str(vision_checkpoint)) as server:
        yield server


@pytest.fixture(scope="session")
def live() -> Iterator[Server]:
    """The server with the shipped model and no key, one for all tests."""
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def locked() -> Iterator[Server]:
    """The same with a key, and strict about the model's name."""
    with Server("--strict-model", env={"ONEPASS_API_KEY": "sesame"}) as server:
        yield server
