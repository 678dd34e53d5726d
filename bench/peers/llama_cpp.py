"""One sample of llama.cpp, through the low-level API of llama-cpp-python."""

from __future__ import annotations

import sys
from pathlib import Path

# This folder holds files named like the packages they import: look one folder higher instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import llama_cpp as api  # noqa: E402
import numpy as np  # noqa: E402

import sample  # noqa: E402

LONGEST = 2048
WIDEST = 16


@api.llama_log_callback
def log(level: int, text: bytes, _data: object) -> None:
    """Errors only."""
    if level == 4:
        sys.stderr.write(text.decode("utf-8", "replace"))


class Llama:
    """A `sample.Engine`."""

    def __init__(self, path: Path, threads: int) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp can't load it")
        params = api.llama_context_default_params()
        params.n_ctx = LONGEST + 256
        params.n_batch = LONGEST
        params.n_outputs_max = WIDEST  # or it reserves memory for logits of every prompt token
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"{path}: llama.cpp can't make a context for it")
        self.memory = api.llama_get_memory(self.context)
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(LONGEST, 0, 1)
        self.length = 0

    def forward(self, tokens: list[int], all_rows: bool = False) -> int:
        batch, last = self.batch, len(tokens) - 1
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.length + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_rows or i == last
        if (status := api.llama_decode(self.context, batch)) != 0:
            raise SystemExit(f"llama_decode returned {status}")
        self.length += len(tokens)
        # Asking for logits also waits for them.
        logits = api.llama_get_logits_ith(self.context, last)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())

    def rollback(self, length: int) -> None:
        if not api.llama_memory_seq_rm(self.memory, 0, length, -1):
            raise SystemExit("llama.cpp can't roll its cache back")
        self.length = length


def main() -> None:
    args = sample.arguments(__doc__).parse_args()
    api.llama_log_set(log, None)
    plan = sample.QUICK if args.quick else sample.Plan()
    sample.report(lambda: Llama(args.model, args.threads), plan, args.threads)


if __name__ == "__main__":
    main()
