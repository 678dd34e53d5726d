"""Training: three phases of distillation.

The loss is the cross-entropy of the drafts' distribution against the target's own at the same
position, over the draft vocabulary and a random handful of other tokens. In the last phase the
head runs three chained steps, as it does when it drafts, and learns from all three; in its second
half with weights rounded to 4 bits, so that quantization costs little.
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

from data import Sample
from head import Head
from target import HIDDEN, VOCAB, Target

MICRO_BATCHES = 4  # per optimizer step
MICRO_TOKENS = 1100  # padded response tokens in one
WINDOW = 192  # samples sorted by length together
NEGATIVES = 1024
HARD_SHARE = 0.1  # of the training distribution that goes to the target's best token
CHECKPOINT_EVERY = 50


@dataclass(frozen=True)
class Phase:
    """One training run. The rate warms up, holds, then falls linearly to `floor` times itself."""

    name: str
    steps: int
    chain: tuple[float, ...]  # loss weight of each chained step
    matrix_rate: float
    vector_rate: float
    warmup: int
    decay: float  # the fraction of steps over which the rate falls
    floor: float
    composed: float  # the fraction of composed conversations used
    own: bool  # whether those are used whose user turns the target wrote, or quote the target
    hottest: float = 2.0  # the highest sampling temperature used
    seed: int = 0
    quantized: float = 1.0  # the fraction of steps from which on matrices are rounded to 4 bits

    def rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        hold = int(self.steps * (1 - self.decay))
        if step <= hold:
            return warm
        return warm * max(self.floor, 1 - (step - hold) / (self.steps - hold))


PHASES = (
    Phase("basics", 480, (1.0,), 2.5e-3, 1e-3, 15, 0.8, 0.3, composed=1.0, own=False),
    Phase("variety", 110, (1.0,), 2e-3, 1e-3, 8, 0.5, 0.6, 0.25, True, hottest=0.95, seed=3),
    Phase(
        "chained", 900, (1.0, 0.8, 0.6), 1.5e-3, 7e-4, 15, 0.9, 0.02, 1.0, True, 0.95, seed=4,
        quantized=0.5,
    ),
)  # fmt: skip


def micro_batches(samples: list[Sample], seed: int) -> Iterator[list[Sample]]:
    """Batches of similar response length, epoch after epoch, the same ones for the same seed."""
    rng = random.Random(seed)

    def length(sample: Sample) -> int:
        return len(sample["ids"]) - sample["start"]

    while True:
        order = samples[:]
        rng.shuffle(order)
        epoch: list[list[Sample]] = []
        for low in range(0, len(order), WINDOW):
            batch: list[Sample] = []
            for sample in sorted(order[low : low + WINDOW], key=length):
                if batch and length(sample) * (len(batch) + 1) > MICRO_TOKENS:
                    epoch.append(batch)
                    batch = []
                batch.append(sample)
            epoch.append(batch)
        rng.shuffle(epoch)
        yield from epoch


@dataclass
class Batch:
    """Samples side by side, padded on the left so that all responses begin at column first+1."""

    tokens: Tensor  # int64 [B, T], token p+1 of row p
    hidden: Tensor  # f32 [B, T+1, HIDDEN]
    real: Tensor  # bool [B, T-first], rows that have a next token to predict
    first: int  # the column of the first bonus row
    pad: Tensor  # int64 [B]


def collate(samples: list[Sample]) -> Batch:
    """Pad samples into a batch. Row p predicts token p+2, so the last two tokens have no row."""
    first = max(s["start"] for s in samples) - 1
    width = first + max(len(s["ids"]) - s["start"] for s in samples) - 1
    pad = torch.tensor([first + 1 - s["start"] for s in samples])
    tokens = torch.zeros(len(samples), width, dtype=torch.long)
    hidden = torch.zeros(len(samples), width + 1, HIDDEN)
    real = torch.zeros(len(samples), width - first, dtype=torch.bool)
    for i, sample in enumerate(samples):
        low, n = int(pad[i]), len(sample["ids"])
        tokens[i, low : low + n - 2] = sample["ids"][1:-1]
        hidden[i, low : low + n - 1] = sample["hidden"].float()
        real[i, : n - 1 - sample["start"]] = True
    return Batch(tokens, hidden, real, first, pad)


def losses(
    head: Head, batch: Batch, embedding: Tensor, output: Tensor, steps: int
) -> list[tuple[Tensor, Tensor]]:
    """Summed loss and count of agreeing best tokens for each chained step.

    embedding f32 [VOCAB, HIDDEN]; output [v, HIDDEN] are the rows of the tokens competed over.
    """
    outputs = head.chained(
        embedding[batch.tokens], batch.hidden[:, :-1], batch.first, steps, batch.pad
    )
    with torch.no_grad():
        after = batch.hidden[:, batch.first + 1 :][batch.real]
        wanted = F.linear(after, output).float().softmax(-1)
        best = wanted.argmax(-1)
        wanted.mul_(1 - HARD_SHARE)
        wanted[torch.arange(len(best)), best] += HARD_SHARE
        # Scores are linear in an output, and so is what the cross-entropy makes of those wanted.
        center = (wanted.to(output.dtype) @ output).float()
    row = torch.arange(batch.real.shape[1]).expand_as(batch.real)[batch.real]
    result = []
    for k, o in enumerate(outputs):
        # Step k has no rows for a response's first k columns.
        logits = F.linear(o[batch.real[:, k:]], output).float()
        chosen = row >= k
        said = (o[batch.real[:, k:]].float() * center[chosen]).sum()
        loss = logits.logsumexp(-1).sum() - said
        result.append((loss, (logits.detach().argmax(-1) == best[chosen]).sum()))
    return result


def optimizers(head: Head, phase: Phase) -> list[torch.optim.Optimizer]:
    """Muon for the matrices; Adam for the norm weights, at rates in proportion to their sizes."""
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = [p for p in head.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(
        matrices, lr=phase.matrix_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        dict(params=[p], lr=phase.vector_rate * max(1.0, float(p.detach().abs().mean())))
        for p in vectors
    ]
    return [muon, torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-10)]


def run_phase(
    phase: Phase,
    head: Head,
    samples: list[Sample],
    target: Target,
    vocabulary: Tensor,
    checkpoint: Path,
    dtype: torch.dtype,
) -> None:
    """Train `head` in place; goes on from `checkpoint` when there is one."""
    chosen = optimizers(head, phase)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, phase.rate) for o in chosen]
    begin = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        begin = state["step"]
        head.load_state_dict(state["head"])
        for item, saved in zip(chosen + schedules, state["rest"]):
            item.load_state_dict(saved)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[vocabulary] = False
    others = outside.nonzero()[:, 0]
    weight = [w / sum(phase.chain) for w in phase.chain]
    batches = micro_batches(samples, phase.seed)
    for _ in range(begin * MICRO_BATCHES):
        next(batches)
    sums = torch.zeros(len(weight), 3)
    clock = time.monotonic()
    for step in range(begin, phase.steps):
        rng = torch.Generator().manual_seed(phase.seed * 100_000 + step)
        group = [collate(next(batches)) for _ in range(MICRO_BATCHES)]
        total = sum(int(b.real.sum()) for b in group)
        head.quantize(step >= phase.quantized * phase.steps)
        for batch in group:
            negatives = others[torch.randperm(len(others), generator=rng)[:NEGATIVES]]
            output = target.output[torch.cat([vocabulary, negatives])]
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                parts = losses(head, batch, target.embedding, output, len(weight))
            sum(w * loss for w, (loss, _) in zip(weight, parts)).div(total).backward()
            for k, (loss, agree) in enumerate(parts):
                sums[k] += torch.tensor([loss.item(), agree.item(), batch.real[:, k:].sum()])
        for item in chosen + schedules:
            item.step()
        for optimizer in chosen:
            optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == phase.steps:
            loss, agree = (sums[:, :2] / sums[:, 2:]).T.tolist()
            figures = " ".join(f"{x:.2f}/{y:.3f}" for x, y in zip(loss, agree))
            print(
                f"  {phase.name} {step + 1}/{phase.steps}: loss/agreement {figures}, "
                f"{time.monotonic() - clock:.0f} s",
                flush=True,
            )
            sums.zero_()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == phase.steps:
            rest = [item.state_dict() for item in chosen + schedules]
            partial = checkpoint.with_suffix(".partial")
            torch.save(dict(step=step + 1, head=head.state_dict(), rest=rest), partial)
            partial.replace(checkpoint)
    head.quantize(False)
