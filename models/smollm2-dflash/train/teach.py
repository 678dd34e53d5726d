"""Training: distillation of all slots of many blocks at once.

One conversation at a time, blocks of a random length are set on a random share of its positions.
The loss of a slot is the cross-entropy of its distribution against the target's own at the same
position, over the draft vocabulary and a random handful of other tokens. Later slots count less;
and in the course of training more and more only those count whose earlier slots were right, as a
draft behind a wrong one is never used.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import shared  # noqa: F401  (makes the modules of the MTP recipe importable)
from data import Sample
from target import VOCAB, Target

from drafter import BLOCK, Drafter

NEGATIVES = 512
HARD_SHARE = 0.1  # of the training distribution that goes to the target's best token
LENGTHS = {2: 1, 3: 2, 4: 5, BLOCK: 3}  # how often blocks of each length are set
SLOT_WEIGHTS = (1.0, 0.8, 0.6, 0.4)
UNREACHED = 0.2  # what a slot behind a wrong one counts in the end
CHECKPOINT_EVERY = 25


@dataclass(frozen=True)
class Course:
    """One training run. The rate warms up, holds, then falls linearly to `floor` times itself."""

    steps: int
    conversations: int = 8  # per optimizer step
    anchors: int = 64  # at most, in one of them
    matrix_rate: float = 2e-3
    vector_rate: float = 1e-3
    warmup: int = 5
    decay: float = 0.7  # the fraction of steps over which the rate falls
    floor: float = 0.02
    seed: int = 0

    def rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        hold = int(self.steps * (1 - self.decay))
        if step <= hold:
            return warm
        return warm * max(self.floor, 1 - (step - hold) / (self.steps - hold))


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized. torch has it too, but in bf16, which many processors emulate."""

    def __init__(self, matrices: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(mean, group["momentum"]))
                # The size that Adam's updates have.
                p.add_(update, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)


def orthogonal(x: Tensor, iterations: int = 4) -> Tensor:
    """The nearest matrix with equal singular values, roughly, by Newton-Schulz iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


def conversations(samples: list[Sample], seed: int) -> Iterator[Sample]:
    """Epoch after epoch in random order, the same one for the same seed."""
    rng = random.Random(seed)
    while True:
        order = samples[:]
        rng.shuffle(order)
        yield from order


def losses(
    drafter: Drafter,
    sample: Sample,
    anchors: Tensor,
    slots: int,
    embedding: Tensor,
    output: Tensor,
    chosen: Tensor,
    unreached: float,
) -> tuple[Tensor, float, Tensor]:
    """The weighted loss of all blocks, their weight, and per slot (count, hits, reached, both).

    output [v, HIDDEN] are the rows of the tokens `chosen` [v] that compete.
    """
    ids, low = sample["ids"], int(anchors[0])
    slot = torch.arange(1, slots)
    places = anchors[:, None] + slot  # [N, slots-1] positions predicted
    real = places < len(ids)
    places = places.clamp(max=len(ids) - 1)
    with torch.no_grad():
        # hidden p decides token p+1
        wanted = F.linear(sample["hidden"][low:].float(), output).softmax(-1)
        best = wanted.argmax(-1)
        wanted.mul_(1 - HARD_SHARE)
        wanted[torch.arange(len(best)), best] += HARD_SHARE
        wanted = wanted[places - 1 - low]
    taps = sample["taps"][: int(anchors[-1])].float()
    logits = F.linear(drafter(embedding, taps, ids, anchors, slots), output)
    loss = -(wanted * logits.log_softmax(-1)).sum(-1)
    with torch.no_grad():
        right = (chosen[logits.argmax(-1)] == ids[places]) & real
        reached = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1).cumprod(1).bool()
        reached &= real
        weight = torch.tensor(SLOT_WEIGHTS[: slots - 1]) * real
        weight = weight * (unreached + (1 - unreached) * reached)
        counts = torch.stack([real.sum(0), right.sum(0), reached.sum(0), (right & reached).sum(0)])
    return (loss * weight).sum(), float(weight.sum()), counts.T


def train(
    course: Course,
    drafter: Drafter,
    samples: list[Sample],
    target: Target,
    vocabulary: Tensor,
    checkpoint: Path,
) -> None:
    """Train `drafter` in place; goes on from `checkpoint` when there is one."""
    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    vectors = [p for p in drafter.parameters() if p.dim() == 1]
    # Norm weights move at rates in proportion to their sizes.
    groups = [
        dict(params=[p], lr=course.vector_rate * max(1.0, float(p.detach().abs().mean())))
        for p in vectors
    ]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-10)
    optimizers = [Muon(matrices, course.matrix_rate), adam]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, course.rate) for o in optimizers]
    begin = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        begin = state["step"]
        drafter.load_state_dict(state["drafter"])
        for item, saved in zip(optimizers + schedules, state["rest"]):
            item.load_state_dict(saved)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[vocabulary] = False
    others = outside.nonzero()[:, 0]
    source = conversations(samples, course.seed)
    for _ in range(begin * course.conversations):
        next(source)
    sums, total_loss, total_weight = torch.zeros(BLOCK - 1, 4), 0.0, 0.0
    clock = time.monotonic()
    for step in range(begin, course.steps):
        rng = torch.Generator().manual_seed(course.seed * 100_000 + step)
        dice = random.Random(course.seed * 100_000 + step)
        negatives = others[torch.randperm(len(others), generator=rng)[:NEGATIVES]]
        chosen = torch.cat([vocabulary, negatives])
        output = target.embedding[chosen]
        unreached = 1 - (1 - UNREACHED) * step / course.steps
        step_weight = 0.0
        for _ in range(course.conversations):
            sample = next(source)
            slots = dice.choices(list(LENGTHS), list(LENGTHS.values()))[0]
            spots = torch.arange(sample["start"], len(sample["ids"]) - 1)
            anchors = spots[torch.randperm(len(spots), generator=rng)[: course.anchors]]
            loss, weight, counts = losses(
                drafter,
                sample,
                anchors.sort().values,
                slots,
                target.embedding,
                output,
                chosen,
                unreached,
            )
            loss.backward()
            step_weight += weight
            total_loss += loss.item()
            total_weight += weight
            sums[: slots - 1] += counts
        for p in drafter.parameters():
            p.grad.div_(step_weight)
        for item in optimizers + schedules:
            item.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == course.steps:
            count, hits, reached, both = sums.clamp(min=1).T
            right = " ".join(f"{x:.3f}" for x in (hits / count).tolist())
            chance = " ".join(f"{x:.3f}" for x in (both / reached).tolist())
            print(
                f"  {step + 1}/{course.steps}: loss {total_loss / total_weight:.3f}, right by slot "
                f"{right}, when reached {chance}, {time.monotonic() - clock:.0f} s",
                flush=True,
            )
            sums.zero_()
            total_loss = total_weight = 0.0
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == course.steps:
            rest = [item.state_dict() for item in optimizers + schedules]
            partial = checkpoint.with_suffix(".partial")
            torch.save(dict(step=step + 1, drafter=drafter.state_dict(), rest=rest), partial)
            partial.replace(checkpoint)
