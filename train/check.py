"""Checks that the quick forward gives the scores of transformers' own, on rows of the data."""

import argparse
from pathlib import Path

import torch
from data import read_rows
from train import Tools

from model import PointerModel, load_model

TOLERANCE = 2e-3  # of a score; they are a few units large


@torch.no_grad()
def slow_scores(model: PointerModel, tools: Tools, batch: object, joint: bool = False) -> list[list[float]]:
    raise NotImplementedError
