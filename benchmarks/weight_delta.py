"""Bytes and seconds of the differences between consecutive versions of a bfloat16 model, over real AdamW steps.

    python benchmarks/weight_delta.py [--steps 8] [--output benchmarks/records/weight_delta.json]

A random model of 15.7 M parameters has float32 master weights, as the trainer does. Each step trains on random tokens
and rounds the weights to bfloat16; the buckets of the rounded weights are encoded against those of the step before,
decoded and compared bit for bit. Fails if the median difference at a learning rate of 1e-6 takes more than 10 % of the
bytes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.protos.bucket_delta import apply_delta, encode_delta  # noqa: E402
from tandem.protos.manifest import plan_buckets  # noqa: E402
from tandem.protos.types import BucketSpec  # noqa: E402
from tandem.protos.weight_group import empty_bucket, fill_bucket  # noqa: E402

LIMIT = 0.1
RATES = (1e-6, 1e-5, 1e-4)
CPU = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates = {f"{rate:g}": _measure(rate, arguments.steps) for rate in RATES}
    found = rates["1e-06"]["bytes_share"]
    record = {
        "command": f"python benchmarks/weight_delta.py --steps {arguments.steps}",
        "torch": torch.__version__,
        "limit": LIMIT,
        "learning_rates": rates,
    }
    for rate, figures in rates.items():
        print(f"learning rate {rate}: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    print(f"at 1e-06 {found:.2%} of the bytes are sent, limit {LIMIT:.0%}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if found <= LIMIT else 1


def _measure(learning_rate: float, steps: int) -> dict[str, float]:
    """Medians over the steps, the first two left out: AdamW's first steps are its largest."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rounded = _rounded(model)
    num_parameters = sum(tensor.numel() for tensor in rounded.values())
    assert num_parameters >= 14e6
    buckets = plan_buckets(((name, "bfloat16", each.shape) for name, each in rounded.items()), 64 << 20)
    before = _filled(buckets, rounded)
    shares, encode, decode = [], [], []
    for _ in range(steps + 2):
        tokens = torch.randint(0, config.vocab_size, (4, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = _filled(buckets, _rounded(model))
        sent, encode_seconds, decode_seconds = _encode_all(buckets, before, after)
        shares.append(sent / (2 * num_parameters))
        encode.append(encode_seconds)
        decode.append(decode_seconds)
        before = after
    return {
        "parameters": num_parameters,
        "bytes_share": statistics.median(shares[2:]),
        "largest_bytes_share": max(shares),
        "encode_seconds": statistics.median(encode[2:]),
        "decode_seconds": statistics.median(decode[2:]),
    }


def _rounded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}


def _filled(buckets: tuple[BucketSpec, ...], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    buffers = [empty_bucket(spec, CPU) for spec in buckets]
    for spec, buffer in zip(buckets, buffers, strict=True):
        fill_bucket(spec, tensors, buffer, "xxh3")
    return [buffer[: spec.num_bytes] for spec, buffer in zip(buckets, buffers, strict=True)]


def _encode_all(
    buckets: tuple[BucketSpec, ...], before: list[torch.Tensor], after: list[torch.Tensor]
) -> tuple[int, float, float]:
    """Bytes sent, and seconds to encode and to decode."""
    sent, encode_seconds, decode_seconds = 0, 0.0, 0.0
    for spec, base, new in zip(buckets, before, after, strict=True):
        started = time.perf_counter()
        delta = encode_delta(spec, base.numpy(), new.numpy())
        encode_seconds += time.perf_counter() - started
        if delta is None:
            sent += spec.num_bytes
            continue
        sent += len(delta)
        held = base.clone()
        started = time.perf_counter()
        apply_delta(spec, delta, held.numpy())
        decode_seconds += time.perf_counter() - started
        assert held.equal(new), "a difference is lossless"
    return sent, encode_seconds, decode_seconds


if __name__ == "__main__":
    sys.exit(main())
