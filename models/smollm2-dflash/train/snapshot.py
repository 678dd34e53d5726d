"""Writing a drafter as a DFlash snapshot, the folder that an engine loads, and its golden drafts.

The stored ids are teacher-forced when drafts are compared, because the target's greedy margins are
tight: other arithmetic may decide differently somewhere, and then everything after it would differ
for no fault of the drafter's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import shared  # noqa: F401  (makes the modules of the MTP recipe importable)
import target as smol
from golden import greedy
from prompts import Prompt
from quantize import BITS, GROUP, quantize
from target import Target
from tokens import EOS, Chat

from drafter import BLOCK, EPS, LAYERS, MASK, TAPS, Drafter, load_snapshot

WEIGHTS = "model.safetensors"
DEPTHS = (3, BLOCK - 1)
NOTE = (
    "A round at depth d runs one block of d + 1 slots: the bonus token at index bonus_index of "
    "prompt_ids + greedy_ids, and d mask tokens; its context rows are the taps of all earlier "
    "positions. margin is the smallest distance between the scores of a draft and its runner-up. "
    "All in f32, on the weights as stored."
)


def config(vocabulary_size: int) -> dict[str, Any]:
    """The snapshot's config.json."""
    scheme = dict(group_size=GROUP, bits=BITS, mode="affine")
    return dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        block_size=BLOCK,
        num_target_layers=smol.LAYERS,
        dflash_config=dict(mask_token_id=MASK, target_layer_ids=list(TAPS)),
        hidden_size=smol.HIDDEN,
        intermediate_size=smol.INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=smol.HEADS,
        num_key_value_heads=smol.KV_HEADS,
        head_dim=smol.HEAD_DIM,
        rms_norm_eps=EPS,
        vocab_size=smol.VOCAB,
        hidden_act="silu",
        attention_bias=False,
        attention_dropout=0.0,
        layer_types=["full_attention"] * LAYERS,
        use_sliding_window=False,
        sliding_window=None,
        max_window_layers=LAYERS,
        max_position_embeddings=8192,
        rope_theta=smol.ROPE_THETA,
        rope_scaling=None,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        dtype="bfloat16",
        mlxhost=dict(
            target="SmolLM2-135M-Instruct",
            target_file=smol.MODEL_FILE,
            draft_vocab_file="draft_vocab.json",
            draft_vocab_size=vocabulary_size,
        ),
        quantization=scheme,
        quantization_config=scheme,
    )


def export(folder: Path, drafter: Drafter, vocabulary: Tensor) -> None:
    """Write the drafter, its matrices in 4 bits and its norms in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in drafter.state_dict().items():
        weight = parameter.to(torch.bfloat16).contiguous()
        if weight.dim() == 2:
            module = name.removesuffix(".weight")
            parts = quantize(weight)
            tensors.update(zip((name, f"{module}.scales", f"{module}.biases"), parts))
        else:
            tensors[name] = weight
    save_file(tensors, folder / WEIGHTS, metadata=dict(format="mlx"))
    index = dict(
        metadata=dict(
            total_size=sum(t.nbytes for t in tensors.values()),
            total_parameters=sum(p.numel() for p in drafter.parameters()),
        ),
        weight_map={name: WEIGHTS for name in sorted(tensors)},
    )
    (folder / "config.json").write_text(json.dumps(config(len(vocabulary)), indent=2))
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=1))
    (folder / "draft_vocab.json").write_text(json.dumps(dict(ids=vocabulary.tolist())))


@torch.no_grad()
def rounds(
    drafter: Drafter,
    embedding: Tensor,
    ids: list[int],
    prompt_len: int,
    taps: Tensor,
    depth: int,
    vocabulary: Tensor,
) -> list[dict[str, Any]]:
    """Speculative rounds along `ids`, the first bonus at index `prompt_len`.

    taps [n, ...] are the target's, for all of `ids` but the last. Rounds stop where fewer than
    `depth` tokens are left to compare with.
    """
    output, whole = embedding[vocabulary], torch.tensor(ids)
    bonus = prompt_len
    result = []
    while bonus + depth < len(ids):
        states = drafter(embedding, taps[:bonus], whole, torch.tensor([bonus]), depth + 1)[0]
        scores, places = (states @ output.T).topk(2, -1)
        drafts = vocabulary[places[:, 0]].tolist()
        accepted = 0
        while accepted < depth and drafts[accepted] == ids[bonus + 1 + accepted]:
            accepted += 1
        margin = round(float((scores[:, 0] - scores[:, 1]).min()), 4)
        result.append(
            dict(
                bonus_index=bonus, bonus=ids[bonus], drafts=drafts, accepted=accepted, margin=margin
            )
        )
        bonus += accepted + 1
    return result


def _all_rounds(
    folder: Path, target: Target, prompt: list[int], continuation: list[int]
) -> tuple[dict[str, list[dict[str, Any]]], Tensor]:
    """The rounds at every depth, by name, and the target's hidden along the way."""
    drafter, vocabulary = load_snapshot(folder)
    ids = prompt + continuation
    taps = dict.fromkeys(TAPS, torch.empty(0))
    hidden = target.read(ids[:-1], taps)
    joined = torch.cat([t[0] for t in taps.values()], -1)
    everything = torch.arange(smol.VOCAB)
    result = {
        f"rounds_depth{depth}_{name}": rounds(
            drafter, target.embedding, ids, len(prompt), joined, depth, ids_of
        )
        for depth in DEPTHS
        for name, ids_of in (("full", everything), ("reduced", vocabulary))
    }
    return result, hidden


def write_golden(
    folder: Path, target: Target, chat: Chat, prompts: list[Prompt], limit: int
) -> None:
    """Write FOLDER/golden.json for the drafter that lies there."""
    entries = []
    for prompt in prompts:
        start = chat.prompt(prompt["prompt"])
        continuation = greedy(target, start, limit)
        found, hidden = _all_rounds(folder, target, start, continuation)
        top = target.logits(hidden[len(start) - 1 :]).topk(2, -1).values
        entry: dict[str, Any] = dict(prompt=prompt["prompt"], cls=prompt["cls"])
        entry.update(prompt_ids=start, greedy_ids=continuation, text=chat.text(continuation))
        entry["min_top1_top2_margin"] = float((top[:, 0] - top[:, 1]).min())
        entries.append(entry | found)
    golden = dict(depths=DEPTHS, note=NOTE, prompts=entries)
    (folder / "golden.json").write_text(json.dumps(golden, indent=1))


def check_golden(folder: Path, target: Target) -> bool:
    """Recompute every stored round of FOLDER/golden.json; print and return whether all agree."""
    golden = json.loads((folder / "golden.json").read_text())
    total: dict[str, list[int]] = {}
    for entry in golden["prompts"]:
        found, _ = _all_rounds(folder, target, entry["prompt_ids"], entry["greedy_ids"])
        for key, got in found.items():
            # The margin is in the last digits of the arithmetic; what is drafted is not.
            same = sum(
                all(a[k] == b[k] for k in ("bonus", "drafts", "accepted"))
                for a, b in zip(got, entry[key])
            )
            sums = total.setdefault(key, [0, 0, 0])
            sums[0] += same
            sums[1] += max(len(got), len(entry[key]))
            sums[2] += sum(r["accepted"] for r in got)
    for key, (same, count, accepted) in total.items():
        print(
            f"{folder.name} golden {key}: {same}/{count} rounds agree, "
            f"{1 + accepted / count:.2f} tokens per pass",
            flush=True,
        )
    return all(same == count for same, count, _ in total.values())
