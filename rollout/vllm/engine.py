"""One sampler: a vLLM engine that answers with trajectories and takes new weights while it samples."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tandem.protos.errors import (
    DataError,
    EnvironmentLackError,
    TandemError,
    UnavailableError,
    WeightTransferError,
    error_class,
)
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import SamplingParameters, Segment, Trajectory, VersionSpan, WeightGroupAddress, WeightManifest
from tandem.rollout.config import RolloutConfig
from tandem.rollout.vllm.engine_folder import EngineFolder
from tandem.rollout.vllm.launch import one_line, start_vllm

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


_NO_VERSION = (0, -1)
_LONGEST_POLL_SECONDS = 0.02
_SHUTDOWN_SECONDS = 3.0
_ANSWER_SECONDS = (
    120.0  # an engine that makes no step for so long hangs; applying weights is the longest of what it is asked
)


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one weight update took. `stall_seconds`: how long the engine made no step because of it."""

    digests: tuple[str, ...]
    transfer_seconds: float
    stall_seconds: float


@dataclass(slots=True)
class EngineFigures:
    """Sums since the engine's start. Busy: at least one request in flight."""

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    weight_updates: int = 0
    weight_stall_seconds: float = 0.0
    busy_seconds: float = 0.0


class SamplerEngine:
    """A vLLM AsyncLLM behind Tandem's nouns. Made by `start`, ended by `close`; all methods belong to one event
    loop.
    """

    def __init__(self, llm: AsyncLLM, folder: EngineFolder, *, max_model_tokens: int, seed: int) -> None:
        self._llm = llm
        self._folder = folder
        self._tokenizer: Any = llm.get_tokenizer()
        self._max_model_tokens = max_model_tokens
        self._seed = seed
        self._version = _NO_VERSION
        self._update_lock = asyncio.Lock()
        self._request_numbers = itertools.count()
        self._in_flight = 0
        self._busy_since = 0.0
        self._figures = EngineFigures()

    @classmethod
    async def start(
        cls,
        config: RolloutConfig,
        *,
        model_path: str,
        dtype: Literal["float32", "bfloat16"],
        max_model_tokens: int,
        seed: int,
        shares_gpu: bool = False,
        rows_per_group: int = 0,
    ) -> SamplerEngine:
        """Loads the model and starts the engine's process; call it from the main thread, before threads or gRPC exist.

        Args:
            max_model_tokens: longest prompt and answer together.
            shares_gpu: the trainer lives on the same GPU, so the KV cache takes `config.kv_cache_bytes` only.
            rows_per_group: trajectories of a group that are sampled side by side; 0: `config.samples_per_prompt`.

        Raises:
            ModelError: the model folder cannot be used.
            EnvironmentLackError: memory is short, or the engine does not start on this machine.
        """
        folder = EngineFolder()
        try:
            llm = start_vllm(
                config,
                model_path=model_path,
                dtype=dtype,
                max_model_tokens=max_model_tokens,
                seed=seed,
                shares_gpu=shares_gpu,
                rows_per_group=rows_per_group or config.samples_per_prompt,
                folder=folder,
            )
        except BaseException:
            folder.close()
            raise
        engine = cls(llm, folder, max_model_tokens=max_model_tokens, seed=seed)
        try:
            # Nothing is staged: this stamps the weights as no version of ours, and shows whether the plugin is there.
            await engine._core("apply_staged_weights", _stamp(*_NO_VERSION))
        except TandemError as error:
            engine.close()
            raise EnvironmentLackError(
                f"vLLM's engine process lacks Tandem's plugin ({error}); install the project: pip install -e ."
            ) from error
        return engine

    @property
    def incarnation(self) -> int:
        return self._version[0]

    @property
    def policy_version(self) -> int:
        """The version of the weights, -1 before the first update."""
        return self._version[1]

    @property
    def is_dead(self) -> bool:
        """True once the engine's process is gone; every request then fails."""
        return bool(self._llm.errored)

    async def check(self) -> None:
        """Raises UnavailableError unless the engine still makes steps: its process may be alive and yet hang."""
        await self._core("get_weight_version")

    def figures(self) -> EngineFigures:
        """The sums as of now."""
        running = time.monotonic() - self._busy_since if self._in_flight else 0.0
        return replace(self._figures, busy_seconds=self._figures.busy_seconds + running)

    def close(self) -> None:
        """Ends the engine's process and removes what it kept on disk."""
        try:
            self._llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        finally:
            self._folder.close()
        self._llm.shutdown = _nothing  # type: ignore[method-assign]  # its __del__ calls it again, when the interpreter is half gone

    async def sample(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        num_samples: int,
        sampling: SamplingParameters,
        *,
        key: str = "",
    ) -> tuple[Trajectory, ...]:
        """The trajectories 0 … num_samples − 1 of one prompt; see `sample_one`."""
        rows = (self.sample_one(prompt_ids, sampling, trajectory_id=number, key=key) for number in range(num_samples))
        return tuple(await asyncio.gather(*rows))

    async def sample_one(
        self,
        prompt_ids: Sequence[int] | NDArray[np.int32],
        sampling: SamplingParameters,
        *,
        trajectory_id: int,
        key: str = "",
    ) -> Trajectory:
        """One trajectory. With a `key` (a group's id) or a seed in `sampling`, its random numbers depend on nothing but
        the run's seed, those two and `trajectory_id`.

        One request a trajectory: it ends, is saved and is aborted alone, and its spans are its own.

        Raises:
            DataError: the prompt does not fit the model.
            UnavailableError: the engine's process is gone.
        """
        prompt = np.asarray(prompt_ids, np.int32)
        room = self._max_model_tokens - len(prompt)
        if not len(prompt) or room < 1:
            raise DataError(
                f"prompt of {len(prompt)} tokens leaves no room in {self._max_model_tokens} tokens, or is empty"
            )
        params = self._sampling_params(sampling, min(sampling.max_tokens, room), trajectory_id, key)
        async with self._one_more_in_flight():
            output = await self._generate(prompt, params, f"{key}/{trajectory_id}/{next(self._request_numbers)}")
        self._figures.prompt_tokens += len(prompt)
        self._figures.sampled_tokens += len(output.token_ids)
        return self._trajectory(prompt, output, sampling, trajectory_id)

    async def join_weight_group(self, address: WeightGroupAddress, first_rank: int, timeout_seconds: float) -> None:
        """Enters a weight group as ranks `first_rank` …, one a tensor-parallel worker; leaves the one before.

        Raises:
            WeightTransferError: the group did not come together before the deadline.
        """
        arguments = {"address": asdict(address), "first_rank": first_rank, "timeout_seconds": timeout_seconds}
        async with self._update_lock:
            await self._weight_job("join", arguments, timeout_seconds)

    async def update_weights(self, manifest: WeightManifest, group_name: str, timeout_seconds: float) -> UpdateReport:
        """Receives a version beside generation and applies it between two engine steps. Running requests keep their KV.

        Goes on to its end even if the caller is cancelled, so that the stamp never differs from the weights.

        Raises:
            WeightTransferError: a bucket did not come before the deadline or is damaged; the engine keeps the weights
                it has.
            UnavailableError: the engine's process is gone.
        """
        return await asyncio.shield(asyncio.ensure_future(self._update_weights(manifest, group_name, timeout_seconds)))

    async def _update_weights(self, manifest: WeightManifest, group_name: str, timeout_seconds: float) -> UpdateReport:
        arguments = {
            "manifest": encode_manifest(manifest),
            "group_name": group_name,
            "timeout_seconds": timeout_seconds,
        }
        async with self._update_lock:
            workers = await self._weight_job("receive", arguments, timeout_seconds)
            stall_seconds = float(
                await self._core("apply_staged_weights", _stamp(manifest.incarnation, manifest.policy_version))
            )
            self._version = (manifest.incarnation, manifest.policy_version)
        self._figures.weight_updates += 1
        self._figures.weight_stall_seconds += stall_seconds
        return UpdateReport(tuple(workers[0]["digests"]), max(worker["seconds"] for worker in workers), stall_seconds)

    async def _weight_job(self, job: str, arguments: dict[str, Any], timeout_seconds: float) -> list[dict[str, Any]]:
        """Starts a job on every worker and waits for all; a look costs the engine some 0.2 ms between two steps."""
        deadline = (
            time.monotonic() + timeout_seconds + 1.0
        )  # the workers' own deadline names the cause, so it comes first
        await self._core("start_weight_job", job, arguments)
        pause = 0.001
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
            workers: list[dict[str, Any]] = await self._core("weight_job_progress")
            for worker in workers:
                if worker["error"]:
                    raise error_class(worker["error"][0])(worker["error"][1])
            if all(worker["done"] for worker in workers):
                return workers
            if time.monotonic() > deadline:
                raise WeightTransferError(f"the {job} of weights had not ended after {timeout_seconds:g} s")

    async def _core(self, method: str, *arguments: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        call = self._llm.engine_core.call_utility_async(method, *arguments)  # type: ignore[attr-defined]
        try:
            return await asyncio.wait_for(call, _ANSWER_SECONDS)
        except TimeoutError as error:
            raise UnavailableError(f"the engine did not answer {method} within {_ANSWER_SECONDS:g} s") from error
        except EngineDeadError as error:
            raise UnavailableError(
                "the engine's process is gone; its last lines are above or in the sampler's log"
            ) from error
        except Exception as error:  # vLLM raises a bare Exception for whatever went wrong inside the engine
            raise WeightTransferError(f"{method} failed inside the engine: {error}") from error

    def _sampling_params(self, sampling: SamplingParameters, max_tokens: int, trajectory_id: int, key: str) -> Any:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        seed = self._seed if sampling.seed is None else sampling.seed
        try:
            return SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=max_tokens,
                seed=_request_seed(seed, key, trajectory_id) if key or sampling.seed is not None else None,
                stop=list(sampling.stop),
                repetition_penalty=sampling.repetition_penalty,
                logprobs=0,  # the sampled token's only
                flat_logprobs=True,
                detokenize=bool(sampling.stop),  # vLLM must read along only to find stop strings
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except (VLLMValidationError, ValueError) as error:
            raise DataError(f"sampling parameters cannot be used: {one_line(error)}") from error

    async def _generate(self, prompt: NDArray[np.int32], params: Any, request_id: str) -> CompletionOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        final = None
        try:
            salted = tokens_input(prompt.tolist(), cache_salt=_stamp(*self._version))
            async for output in self._llm.generate(salted, params, request_id):
                final = output
        except (VLLMValidationError, ValueError) as error:
            raise DataError(f"prompt cannot be sampled: {one_line(error)}") from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise UnavailableError(f"the engine failed: {one_line(error)}") from error
        assert final is not None, "a request ends with an output"
        return final.outputs[0]

    def _trajectory(
        self, prompt: NDArray[np.int32], output: CompletionOutput, sampling: SamplingParameters, trajectory_id: int
    ) -> Trajectory:
        sampled = np.asarray(output.token_ids, np.int32)
        segment = Segment(
            ids=np.concatenate([prompt, sampled]),
            behavior_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), _sampled_logprobs(output)]),
            loss_mask=np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(sampled)]),
            spans=tuple(
                VersionSpan(len(prompt) + span.start, *_parse_stamp(span.version))
                for span in output.weight_versions or ()
            ),
        )
        finish: Any = output.finish_reason if output.finish_reason in ("stop", "length", "abort") else "error"
        text = self._tokenizer.decode(sampled.tolist(), skip_special_tokens=True)
        return Trajectory(trajectory_id, "policy", (segment,), finish, text, sampling)

    @contextlib.asynccontextmanager
    async def _one_more_in_flight(self) -> AsyncIterator[None]:
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._figures.busy_seconds += time.monotonic() - self._busy_since


def _sampled_logprobs(output: CompletionOutput) -> NDArray[np.float32]:
    logprobs: Any = output.logprobs
    values = np.asarray(logprobs.logprobs, np.float32)
    assert len(values) == len(output.token_ids), "one log-prob a sampled token"
    return values


def _nothing(timeout: float | None = None) -> None:
    pass


def _stamp(incarnation: int, policy_version: int) -> str:
    return f"{incarnation}:{policy_version}"


def _parse_stamp(stamp: str) -> tuple[int, int]:
    incarnation, _, policy_version = stamp.partition(":")
    return int(incarnation), int(policy_version)


def _request_seed(seed: int, key: str, trajectory_id: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{key}/{trajectory_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # vLLM wants a non-negative 64-bit number
