"""A vLLM AsyncLLM as a sampler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from tandem.protos.errors import DataError, EnvironmentLackError, TandemError, UnavailableError, WeightTransferError
from tandem.protos.types import FinishReason, SamplingMask, SamplingParameters, version_span
from tandem.rollout.engine import SamplerArguments, one_line
from tandem.rollout.sampler import NO_VERSION, Completion, Sampler, SamplingRequest, TransferProgress
from tandem.rollout.vllm.collected_outputs import SAMPLED_LOGPROBS
from tandem.rollout.vllm.engine_folder import EngineFolder
from tandem.rollout.vllm.launch import start_vllm
from tandem.rollout.vllm.seeded_requests import SAMPLED_TOKENS

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

_SHUTDOWN_SECONDS = 3.0
_DEATH_POLL_SECONDS = 1.0
# An engine that makes no step for this long hangs. Its longest operation is applying weights.
_ANSWER_SECONDS = 120.0
_READ_POLL_SECONDS = 0.001
_FINISH_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


async def start_sampler(arguments: SamplerArguments) -> Sampler:
    folder = EngineFolder()
    try:
        llm = start_vllm(arguments, folder)
    except BaseException:
        folder.close()
        raise
    sampler = VllmSampler(llm, folder, arguments)
    try:
        # Nothing is staged. This stamps the weights as NO_VERSION and fails if the plugin is missing.
        await sampler._core("apply_staged_weights", _stamp(*NO_VERSION))
    except TandemError as error:
        sampler.close()
        raise EnvironmentLackError(
            f"vLLM's engine process lacks Tandem's plugin ({error}); install the project: pip install -e ."
        ) from error
    return sampler


class VllmSampler(Sampler):
    """Talks to the engine's process; rollout/vllm/plugin.py adds the calls that vLLM's EngineCore lacks."""

    def __init__(self, llm: AsyncLLM, folder: EngineFolder, arguments: SamplerArguments) -> None:
        super().__init__(
            llm.get_tokenizer(),
            max_model_tokens=arguments.max_model_tokens,
            seed=arguments.seed,
            group_store=arguments.group_store,
        )
        self._llm = llm
        self._folder = folder
        self._prepared: EngineCoreRequest | None = None
        self._prepared_for: tuple[object, ...] = (None, None, None)
        self._unsent: list[tuple[EngineCoreRequest, list[_Answer]]] = []
        """Answers that the engine does not know yet, by the request of their group."""
        self._sending: set[asyncio.Task[None]] = set()
        self._waiting: set[_Answer] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    async def check(self) -> None:
        await self._core("get_weight_version")

    def close(self) -> None:
        try:
            self._llm.shutdown(timeout=_SHUTDOWN_SECONDS)
        finally:
            self._folder.close()
        # its __del__ calls it again during the interpreter's shutdown
        self._llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]

    async def _generate(self, request: SamplingRequest) -> Completion:
        answer = _Answer(request)
        prepared = self._engine_request(request)
        self._waiting.add(answer)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._end_waits_for_dead_engine())
        try:
            self._expect(prepared, answer)
            self._send_soon(prepared, answer)
            output = await answer.output
            reason = _FINISH_REASONS.get(output.finish_reason, "error")
            versions = output.weight_versions
            return _completion(output.token_ids, answer.logprobs, versions, reason, answer.num_cached)
        finally:
            self._waiting.discard(answer)
            if not answer.has_result:
                answer.output.cancel()
                aborting = asyncio.ensure_future(self._llm.abort(request.request_id, internal=True))
                await asyncio.wait((aborting,), timeout=_SHUTDOWN_SECONDS)

    async def _end_waits_for_dead_engine(self) -> None:
        """The engine may end without answering a new request. One task looks for all, because a timer for each would
        take as long as a short answer.
        """
        while self._waiting:
            await asyncio.sleep(_DEATH_POLL_SECONDS)
            if self.is_dead:
                for answer in self._waiting:
                    answer.put(UnavailableError("the engine has ended"))

    def _expect(self, prepared: EngineCoreRequest, answer: _Answer) -> None:
        """Tells vLLM's output processor, which reads no seed, of a row, and where its answer begins."""
        processor, request, row = self._llm.output_processor, answer.request, copy(prepared)
        row.request_id = row.external_req_id = request.request_id
        row.prompt_token_ids = request.prompt_ids.tolist() if request.sampled_ids else row.prompt_token_ids
        processor.add_request(row, None, None, 0, answer)  # type: ignore[arg-type]
        state = processor.request_states[request.request_id]
        assert prepared.sampling_params is not None
        answer.logprobs = _SampledLogprobs(prepared.sampling_params.logprobs or 0)
        state.logprobs_processor = answer.logprobs  # type: ignore[assignment]
        if request.sampled_ids:  # stop strings are found from the answer's first token on
            detokenizer = state.detokenizer
            assert detokenizer is not None
            detokenizer.update([*request.sampled_ids], stop_terminated=False)

    async def _sampled_so_far(self, request_ids: Collection[str]) -> Mapping[str, Completion]:
        sampled = await self._core("send_collected_outputs")
        states = self._llm.output_processor.request_states
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                # The outputs have arrived with the answer, but another task reads them.
                while any(_num_sampled(states[one]) < sampled[one] for one in sampled.keys() & states.keys()):
                    if self.is_dead:
                        raise UnavailableError("the engine has ended")
                    await asyncio.sleep(_READ_POLL_SECONDS)
        except TimeoutError as error:
            raise UnavailableError(f"outputs were not read within {_ANSWER_SECONDS:g} s") from error
        running = [state for one in request_ids if (state := states.get(one)) is not None and _num_sampled(state)]
        return {state.request_id: _completion_so_far(state) for state in running}

    def _send_soon(self, prepared: EngineCoreRequest, answer: _Answer) -> None:
        """Has the request sent together with all that the loop's other tasks ask for at the same time."""
        if not self._unsent:
            sending = asyncio.ensure_future(self._send())
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        if not self._unsent or self._unsent[-1][0] is not prepared:
            self._unsent.append((prepared, []))
        self._unsent[-1][1].append(answer)

    async def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        rows = [(prepared, [(one.request.request_id, one.request.seed) for one in row]) for prepared, row in unsent]
        try:
            await self._core("add_rows", rows)
        except TandemError as error:
            for answer in (answer for _, answers in unsent for answer in answers):
                answer.put(error)

    def _engine_request(self, request: SamplingRequest) -> EngineCoreRequest:
        """vLLM's form of the request, with another row's id and seed. The rows of a group share it, so vLLM checks them
        once. Later turns of episodes have the parameters of the request before, so only their prompt is checked.
        """
        if request.sampled_ids:
            return self._resumed_request(request)
        asked = (request.prompt_ids, request.sampling, self._version)
        prompt_ids, *parameters = self._prepared_for
        if self._prepared is None or parameters != [*asked[1:]]:
            self._prepared = self._prepare(request, request.sampling)
        elif prompt_ids is not request.prompt_ids:
            self._prepared = self._with_prompt(self._prepared, request)
        self._prepared_for = asked
        return self._prepared

    def _with_prompt(self, prepared: EngineCoreRequest, request: SamplingRequest) -> EngineCoreRequest:
        """The same with another prompt, whose length `sample_one` has checked."""
        if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= self._llm.model_config.get_vocab_size():
            return self._prepare(request, request.sampling)  # vLLM says what is wrong
        changed = copy(prepared)
        changed.prompt_token_ids = request.prompt_ids.tolist()
        return changed

    def _resumed_request(self, request: SamplingRequest) -> EngineCoreRequest:
        """For the engine, what an earlier request sampled is a part of the prompt."""
        left = request.sampling.max_tokens - len(request.sampled_ids)
        engine_request = self._prepare(request, replace(request.sampling, max_tokens=left))
        assert engine_request.sampling_params is not None
        engine_request.sampling_params.extra_args = {SAMPLED_TOKENS: len(request.sampled_ids)}
        return engine_request

    def _prepare(self, request: SamplingRequest, sampling: SamplingParameters) -> EngineCoreRequest:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input

        salted = tokens_input(request.known_ids, cache_salt=_stamp(*self._version))
        params = _sampling_params(sampling, self._llm.model_config.get_vocab_size())
        try:
            return self._llm.input_processor.process_inputs(request.request_id, salted, params, ("generate",))
        except (VLLMValidationError, ValueError) as error:
            raise DataError(f"prompt cannot be sampled: {one_line(error)}") from error

    async def _start_transfer(self, kind: Literal["join", "receive"], arguments: Mapping[str, object]) -> None:
        await self._core("start_weight_transfer", kind, arguments)

    async def _transfer_progress(self, version: tuple[int, int] | None) -> tuple[Sequence[TransferProgress], float]:
        # One call: each waits for a step of the engine.
        progress, stall_seconds = await self._core("weight_transfer_progress", version and _stamp(*version))
        return progress, stall_seconds

    async def _core(self, method: str, *arguments: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = self._llm.engine_core.call_utility_async(method, *arguments)  # type: ignore[attr-defined]
        call = asyncio.ensure_future(answer)
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            while not (await asyncio.wait((call,), timeout=_DEATH_POLL_SECONDS))[0]:
                if self.is_dead:
                    raise UnavailableError(f"the engine has ended, and did not answer {method}")
                if time.monotonic() > deadline:
                    raise UnavailableError(f"the engine did not answer {method} within {_ANSWER_SECONDS:g} s")
            return call.result()
        except UnavailableError:
            raise
        except EngineDeadError as error:
            told = "the engine's process is gone; its last lines are above or in the sampler's log"
            raise UnavailableError(told) from error
        except Exception as error:  # vLLM raises a bare Exception for any error in the engine
            raise WeightTransferError(f"{method} failed inside the engine: {error}") from error
        finally:
            call.cancel()


class _Answer:
    """Where vLLM's output processor puts the output of a request, once, at its end."""

    def __init__(self, request: SamplingRequest) -> None:
        self.request = request
        self.logprobs = _SampledLogprobs(0)
        self.num_cached = 0
        self.output: asyncio.Future[CompletionOutput] = asyncio.get_running_loop().create_future()

    @property
    def has_result(self) -> bool:
        return self.output.done() and not self.output.cancelled() and self.output.exception() is None

    def put(self, output: RequestOutput | Exception) -> None:
        if self.output.done():  # cancelled
            return
        if isinstance(output, Exception):  # of the engine, or of vLLM's reading of its outputs
            self.output.set_exception(output if isinstance(output, TandemError) else _failure(output))
        else:
            self.num_cached = output.num_cached_tokens or 0
            self.output.set_result(output.outputs[0])


class _SampledLogprobs:
    """The log-probs of a request's sampled tokens, in place of vLLM's object, which makes several others a token.

    With candidates, the most likely ones of each token, also the sampling mask: what was cut off has a log-prob of −∞.
    """

    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self, num_candidates: int) -> None:
        self.logprobs: list[float] = []
        self._num_candidates = num_candidates
        self._kept_ids: list[NDArray[np.int32]] = []
        self._counts: list[NDArray[np.int32]] = []

    def update_from_output(self, output: EngineCoreOutput) -> None:
        if output.kv_transfer_params is not None:
            self.logprobs += output.kv_transfer_params[SAMPLED_LOGPROBS]
        if (new := output.new_logprobs) is None:
            return
        self.logprobs += new.logprobs[:, 0].tolist()  # the sampled token's come first
        if self._num_candidates:
            candidates = slice(1, 1 + self._num_candidates)  # another request's may follow
            is_kept = np.isfinite(new.logprobs[:, candidates])
            self._kept_ids.append(new.logprob_token_ids[:, candidates][is_kept].astype(np.int32))
            self._counts.append(is_kept.sum(1, dtype=np.int32))

    @property
    def mask(self) -> SamplingMask | None:
        if not self._num_candidates:
            return None
        none = np.zeros(0, np.int32)
        return SamplingMask(np.concatenate([none, *self._kept_ids]), np.concatenate([none, *self._counts]))


def _sampling_params(sampling: SamplingParameters, vocabulary_size: int) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            repetition_penalty=sampling.repetition_penalty,
            # Besides the sampled token's, those of all tokens that truncation may leave.
            logprobs=min(sampling.top_k, vocabulary_size) if sampling.records_mask else 0,
            detokenize=bool(sampling.stop),  # needed only to find stop strings
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (VLLMValidationError, ValueError) as error:
        raise DataError(f"sampling parameters cannot be used: {one_line(error)}") from error
    if params.temperature != sampling.temperature:  # the row would name another one than it was sampled at
        told = f"temperature is {sampling.temperature:g}, and vLLM would sample at {params.temperature:g}"
        raise DataError(f"sampling parameters cannot be used: {told}")
    return params


def _failure(error: Exception) -> UnavailableError:
    return UnavailableError(f"the engine failed: {one_line(error)}")


def _num_sampled(state: RequestState) -> int:
    """The number of tokens that this request sampled and the output processor has read."""
    assert state.logprobs_processor is not None
    return len(cast("list[float]", state.logprobs_processor.logprobs))


def _completion_so_far(state: RequestState) -> Completion:
    detokenizer, logprobs = state.detokenizer, state.logprobs_processor
    assert detokenizer is not None
    sampled = cast("_SampledLogprobs", logprobs)
    return _completion(detokenizer.output_token_ids, sampled, state._weight_version_spans(), "abort")


def _completion(
    token_ids: Sequence[int],
    sampled: _SampledLogprobs,
    versions: Sequence[WeightVersionSpan] | None,
    reason: FinishReason,
    num_cached: int = 0,
) -> Completion:
    """`token_ids` is the whole answer. vLLM has log-probs of only the tokens that this request sampled."""
    before = len(token_ids) - len(sampled.logprobs)
    spans = [version_span(span.start - before, *_parse_stamp(span.version)) for span in versions or ()]
    return Completion(token_ids[before:], [*sampled.logprobs], spans, reason, sampled.mask, num_cached)


def _stamp(incarnation: int, policy_version: int) -> str:
    return f"{incarnation}:{policy_version}"


def _parse_stamp(stamp: str) -> tuple[int, int]:
    incarnation, _, policy_version = stamp.partition(":")
    return int(incarnation), int(policy_version)
