"""Checks the quick training forward against transformers' own, hidden states and gradients, on random weights."""

import argparse

import torch

from model import PointerModel, build_config

TOLERANCE = 1e-3  # relative to the largest value, float32; the decays have the worst gradients, about 4e-4


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    model = PointerModel(build_config(vocab_size=512, pad_token_id=0))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 3  # near-uniform attention would hide faults
    input_ids = torch.randint(1, 512, (3, 160))
    reads = torch.tensor([[5, 31, 32, 159], [0, 64, 100, 127], [33, 95, 96, 130]])
    weights = torch.randn(3, 4, 256)

    ours = model.hidden_states(input_ids, reads)
    torch.autograd.backward((ours * weights).sum())
    gradients = {name: p.grad.clone() for name, p in model.lm.named_parameters() if p.grad is not None}
    model.zero_grad()
    everywhere = model.lm.model(input_ids=input_ids, use_cache=False).last_hidden_state
    theirs = everywhere.gather(1, reads[..., None].expand(-1, -1, 256))
    torch.autograd.backward((theirs * weights).sum())

    worst = {"hidden states": relative_difference(ours, theirs)}
    for name, parameter in model.lm.named_parameters():
        if parameter.grad is not None:
            worst[name] = relative_difference(gradients[name], parameter.grad)
    for name, difference in sorted(worst.items(), key=lambda item: -item[1])[:3]:
        print(f"check: {name} relative_difference={difference:.1e}")
    if max(worst.values()) > TOLERANCE:
        raise SystemExit(f"check: over the tolerance of {TOLERANCE}")


if __name__ == "__main__":
    main()
