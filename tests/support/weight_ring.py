"""A sampler in its own process, a policy in the test's process, and the weight sender between them."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

from tandem.protos.manifest import ParameterSpec
from tandem.protos.types import BucketSpec, SamplingParameters, Trajectory, WeightManifest
from tandem.protos.weight_group import empty_bucket, fill_bucket
from tandem.trainer.backend.base import parameter_specs
from tandem.trainer.weight_sender import WeightSender
from tests.support.adapter_policy import AdapterPolicy
from tests.support.engine_process import EngineProcess

TIMEOUT = 20.0
LONG = SamplingParameters(max_tokens=320)
SHORT = SamplingParameters(max_tokens=60)


class Policy:
    """A transformers model as a source of weights; `step` changes it as a training step does, but by more."""

    rank = 0
    stride = 1
    """A step changes every `stride`-th weight."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                changed = parameter.view(-1)[:: self.stride]
                changed += 0.03 * torch.randn(changed.shape, generator=self._generator)

    def parameter_specs(self) -> Sequence[ParameterSpec]:
        return parameter_specs(self.model)

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        parameters = dict(self.model.named_parameters())
        yield {name: parameters[name] for name in names}


class Ring:
    """An engine, a policy, and the sender between them. `models` holds the model of every version."""

    def __init__(
        self, engine: EngineProcess, policy: Any, bucket_bytes: int, adapters: Any = None, encoding: str = "full"
    ) -> None:
        self.engine = engine
        self.policy = policy
        self.sender = WeightSender(
            policy, bucket_bytes=bucket_bytes, adapters=adapters, store=engine.group_store, encoding=encoding
        )
        self.models: dict[int, Qwen2ForCausalLM] = {}
        self.version: int = engine.call("policy_version")
        self.group_name = ""

    def join(self, tensor_parallel_size: int = 1) -> None:
        address = self.sender.prepare("127.0.0.1", 1 + tensor_parallel_size, "gloo")
        joined = self.engine.submit("join_weight_group", address, 1, 1, TIMEOUT)
        self.sender.connect(TIMEOUT)
        joined.result(TIMEOUT)
        self.group_name = address.group_name

    def update(self, backend: str = "gloo", location: str = "") -> Any:
        """Trains one step, sends the version, and checks the digests the engine reports."""
        self.policy.step()
        self.version += 1
        self.models[self.version] = copy.deepcopy(self.policy.model)
        manifest = self.sender.manifest(1, self.version, backend, location=location)
        snapshot = None
        if manifest.encoding == "delta":
            snapshot = self.sender.snapshot(manifest)
            manifest = replace(manifest, base=snapshot.base)
        if self.sender.fetched_by_samplers(backend):
            sent = self.sender.broadcast(manifest, TIMEOUT)
            report = self.engine.submit("update_weights", sent, "", TIMEOUT).result(TIMEOUT)
        else:
            answer = self.engine.submit("update_weights", manifest, self.group_name, TIMEOUT)
            sent = self.sender.broadcast(manifest, TIMEOUT, snapshot)
            report = answer.result(TIMEOUT)
        assert report.digests == tuple(bucket.digest for bucket in sent.buckets)
        assert self.engine.call("policy_version") == self.version
        return report

    def catch_up(self, *, sender: WeightSender | None = None, **options: bool) -> Any:
        """Sends a copy of the version to the engine, as to a late joiner, and checks the digests the engine reports."""
        offer = (sender or self.sender).start_copy("127.0.0.1", 1, TIMEOUT, **options)
        self.engine.submit("join_weight_group", offer.address, 1, 1, TIMEOUT).result(TIMEOUT)
        report = self.engine.submit("update_weights", offer.manifest, offer.address.group_name, TIMEOUT).result(TIMEOUT)
        assert report.digests == tuple(bucket.digest for bucket in offer.manifest.buckets)
        return offer

    def broadcast(self, buckets: Sequence[BucketSpec], damaged: Container[int] = ()) -> None:
        """Sends some buckets without the sender's loop; the first byte of those numbered `damaged` is changed."""
        assert self.sender._group is not None
        for number, spec in enumerate(buckets):
            buffer = empty_bucket(spec, torch.device("cpu"))
            with self.gather([tensor.name for tensor in spec.tensors]) as tensors:
                fill_bucket(spec, dict(tensors), buffer, "xxh3")
            buffer[0] ^= number in damaged
            self.sender._group.broadcast(buffer, TIMEOUT)

    def gather(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        gathered: AbstractContextManager[Mapping[str, torch.Tensor]] = self.policy.gather(names)
        return gathered

    def sample(self, prompt: Sequence[int], n: int, sampling: SamplingParameters = LONG, key: str = "") -> Future[Any]:
        return self.engine.submit("sample", list(prompt), n, sampling, key=key)

    def start_update(self) -> tuple[WeightManifest, Future[Any]]:
        """Lets the engine wait for the buckets of the next version, which the test sends itself."""
        manifest = self.sender.manifest(1, self.version + 1, "gloo")
        return manifest, self.engine.submit("update_weights", manifest, self.group_name, TIMEOUT)

    def agrees(self, sampling: SamplingParameters = SHORT) -> bool:
        """Whether new answers have the version's number and the log-probs of transformers."""
        rows = self.sample(range(5, 25), 4, sampling).result(60)
        assert all([s.policy_version for s in row.segments[0].spans] == [self.version] for row in rows)
        return all(self.errors(row).mean() <= 1e-5 for row in rows)

    def errors(self, row: Trajectory) -> np.ndarray[Any, Any]:
        """|recorded − recomputed| log-prob per sampled token, recomputed as its spans say: each version reads the
        tokens since the boundary on top of the KV cache that earlier versions left.
        """
        return spanned_errors(
            self.models, row, [(span.first_token, span.policy_version) for span in row.segments[0].spans]
        )


def spanned_errors(
    models: Mapping[int, Qwen2ForCausalLM], row: Trajectory, spans: Sequence[tuple[int, int]]
) -> np.ndarray[Any, Any]:
    (segment,) = row.segments
    ids = torch.tensor(segment.ids, dtype=torch.long)[None]
    num_prompt = len(segment.ids) - segment.num_loss_tokens
    # A token is sampled from what the one before it, as input, gave: version k reads inputs from one before its first
    # token.
    starts = [0] + [first - 1 for first, _ in spans[1:]] + [len(segment.ids) - 1]
    cache = DynamicCache()
    logits = []
    with torch.inference_mode():
        for (_, version), first, end in zip(spans, starts[:-1], starts[1:], strict=True):
            if first == end:  # a test moved the version past the last token
                continue
            output = models[version](ids[:, first:end], past_key_values=cache, use_cache=True)
            logits.append(output.logits[0])
    logprobs = (torch.cat(logits) / row.sampling.temperature).log_softmax(-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[num_prompt - 1 :, 0].numpy()
    return np.abs(chosen - segment.behavior_logprobs[num_prompt:])


class AdapterRing(Ring):
    """A ring whose versions are adapters; each version's model is merged by PEFT."""

    def __init__(self, engine: EngineProcess, policy: AdapterPolicy) -> None:
        super().__init__(engine, policy, bucket_bytes=4 << 10, adapters=policy.adapters)

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        with self.policy.adapters.gather_factors(names) as tensors:
            yield {name: tensor + 1 for name, tensor in tensors.items()}
