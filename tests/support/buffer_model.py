"""The buffer's scripts in plain Python: each method takes what the script of its name takes, and answers the same.

An answer is a number, a text, or a list of them. A refusal raises the error that the client raises; its text is short,
because only its class is compared. Arguments and fields that a script may get later are ignored where they can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.protos.errors import DataError, LedgerError, LostWritesError
from tandem.services.buffer.types import LIVE_STATES
from tests.support.ledger_model import CHUNK, LONGEST_STEP_MS, STAGES, Group, LedgerState, SamplerEntry

Reply = int | list[Any] | str


class LedgerModel(LedgerState):
    """The scripts on the state of one run, from its creation on."""

    def call(self, verb: str, now_us: int, arguments: Sequence[bytes | str | int]) -> Reply:
        """Answers a call at a time of Redis' clock, in microseconds, or raises what the script refuses with."""
        self.now_us, wall_ms = now_us, now_us // 1000
        last, offset = self.clock or (0, 0)
        step = wall_ms - last
        if self.clock:
            offset += min(max(step, 0), LONGEST_STEP_MS) - step
        self.now_ms = wall_ms + offset
        if not 0 <= step < 1000:
            self.clock = (wall_ms, offset)
        texts = [one if isinstance(one, bytes) else str(one) for one in arguments]
        answer: Reply = getattr(self, verb)(*texts)
        return answer

    # ---- the feed ----

    def admission(self) -> Reply:
        return [self.limiter.free, self.limiter.wanted, self.cursor, len(self.set_aside)]

    def admit(self, request: str, cursor: str, after: str, *flat: Any) -> Reply:
        if request in self.answers:
            return int(self.answers[request])
        if after and int(after) != self.cursor:
            return 0
        ids, taken = flat[::2], 0
        if len(set(ids)) < len(ids) or self.admitted.intersection(ids) - self.reentered:
            raise DataError("was admitted before")
        room = min(self.limiter.free, self.limiter.wanted)
        for group_id, payload in zip(ids, flat[1::2], strict=True):
            if group_id not in self.reentered:
                if room == 0:
                    break
                room -= 1
                self._admit(group_id)
                self._enter(group_id, "prompts_waiting", "back").payload = payload
                self.feed_done = ""
            self.reentered.discard(group_id)
            taken += 1
        if taken:
            self.cursor = int(cursor) - (len(ids) - taken)
        self.answers[request] = taken
        return taken

    def mark_exhausted(self, why: str) -> Reply:
        if why == "target" and self.limiter.wanted:
            return 0
        self.feed_done = why
        return 1

    def exhausted(self) -> Reply:
        self._sweep_all()
        before = {group.state for group in self.groups.values() if group.state.startswith(STAGES)}
        return int(bool(self.feed_done) and not before)

    # ---- leases ----

    def claim(self, request: str, stage: str, worker: str, generation: str, n: str, lease_ms: str) -> Reply:
        self._sweep(stage)
        if stage == "prompts":
            self._check_admitted(worker, generation)
        self._check_replaced(worker, generation)
        if request not in self.answers:
            claimed = []
            for group_id in self.queue(f"{stage}_waiting")[: int(n)]:
                self.token = max(self.token + 1, self.now_us)
                group = self._enter(group_id, f"{stage}_leased", self.now_ms + int(lease_ms))
                group.token, group.worker = self.token, worker
                claimed.append((group_id, self.token))
            if claimed:
                self.answers[request] = claimed
        reply: list[Any] = []
        for group_id, token in self.answers.get(request, []):
            if self._holds(group_id, stage, token):
                group = self.groups[group_id]
                reply += [group_id, token, group.payload, group.partial]
        return reply

    def renew(self, lease_ms: str, *flat: Any) -> Reply:
        self._sweep_all()
        lost = []
        for group_id, stage, token, saves, partial in zip(*[iter(flat)] * 5, strict=True):
            if self._holds(group_id, stage, int(token)):
                group = self.groups[group_id]
                group.place = self.now_ms + int(lease_ms)
                group.partial = partial if saves == "1" else group.partial
            else:
                lost.append(token)
        return lost

    def complete(self, stage: str, *flat: Any) -> Reply:
        self._sweep(stage)
        refused = []
        for group_id, token, payload, headers in zip(*[iter(flat)] * 4, strict=True):
            known = self.groups.get(group_id, Group())
            if self._holds(group_id, stage, int(token)):
                known.token, known.worker, known.partial, known.payload = 0, "", None, payload
                known.completed[stage] = int(token)
                if stage == "prompts":
                    self._enter(group_id, "generated_waiting", "back")
                    continue
                if self.consecutive_drops:
                    self.set_aside, self.suspected = self.set_aside | self.suspected, set()
                known.headers, self.consecutive_drops = headers, 0
                self.sequence += 1
                self._enter(group_id, "scored_waiting", self.sequence)
            elif known.completed.get(stage) != int(token):
                self.stale_results_refused += 1
                refused.append(token)
        return refused

    def release(
        self, request: str, group_id: str, stage: str, token: str, reason: str, kind: str, *_detail: str
    ) -> Reply:
        if request in self.answers:
            return str(self.answers[request])
        self._sweep(stage)
        if not self._holds(group_id, stage, int(token)):
            return "refused"
        outcome = "requeued"
        if kind == "voluntary":
            self._requeue(group_id, stage, "front")
        else:
            outcome = self._fail(group_id, stage, kind, reason, "back")
        self.answers[request] = outcome
        return outcome

    # ---- the trainer ----

    def begin_incarnation(self, above: str, _acknowledged: str, number: str) -> Reply:
        self.scored_answer = None
        self._outdate_samplers()
        self.incarnation = max(self.incarnation, int(above)) + 1
        self.trainer_sequence = int(number)
        return self.incarnation

    def check_incarnation(self, *call: str) -> Reply:
        self._fence(call)
        return 1

    def claim_scored(self, *call: str) -> Reply:
        request, n = self._fence(call)
        if self.scored_answer is None or self.scored_answer[0] != request:
            ids = self.queue("scored_waiting")[: int(n)]
            for group_id in ids:
                self.groups[group_id].state = "scored_claimed"
            self.scored_answer = (request, ids) if ids else self.scored_answer
        else:
            ids = self.scored_answer[1]
        known = [(one, self.groups[one].headers if one in self.groups else None) for one in ids]
        return [value for pair in known for value in pair]

    def record(self, *call: str) -> Reply:
        number, *ids = self._fence(call)
        version, fresh = int(number), []
        for group_id in ids:
            group = self.groups.get(group_id, Group())
            if group.state == "scored_claimed":
                fresh.append(group)
            elif group.state != "trained" or group.place != version:
                raise LedgerError("not claimed")
        if fresh and version <= max(self.published_version, self.recorded_version):
            raise LedgerError("was published or recorded before")
        for group in fresh:
            group.state, group.place, group.payload, group.headers = "trained", version, None, None
        self.recorded_version = version if fresh else self.recorded_version
        return 1

    def drop_claimed(self, *call: str) -> Reply:
        reason, *ids = self._fence(call)
        for group_id in ids:
            is_claimed = group_id in self.groups and self.groups[group_id].state == "scored_claimed"
            if not is_claimed and group_id not in self.dropped.get(reason, ()):
                raise LedgerError("cannot be dropped")
        for group_id in self.groups.keys() & set(ids):
            self._drop(group_id, reason)
        return 1

    def publish(self, *call: str) -> Reply:
        number, num_ids, *more = self._fence(call)
        version, ids, samplers = int(number), more[: int(num_ids)], more[int(num_ids) :]
        if version < self.published_version:
            raise LedgerError("cannot be published after a later version")
        trained = self._trained()
        if any(trained.get(group_id) != version for group_id in ids):
            raise LedgerError("not trained in it")
        due = [one for one in trained.values() if self.published_version < one <= version]
        following = min(due, default=version)
        if due:
            self.limiter.retire(one for one in trained if trained[one] == following)
        self.published_version = following
        if following < version:
            return 0
        for name, generation in zip(samplers[::2], samplers[1::2], strict=True):
            if name in self.generations and generation in ("", str(self.generations[name])):
                self._make_live(name, version, self.incarnation)
        self._outdate_samplers((version, self.incarnation))
        return 1

    def commit(self, *call: str) -> Reply:
        (version,) = map(int, self._fence(call))
        if version > self.published_version:
            raise LedgerError("cannot be committed before it is published")
        first = self._commit_first(version)
        if first == self.committed_version + 1:
            self.committed_version = first
        return int(min(self._trained().values(), default=version + 1) > version)

    def drop_outstanding(self, *call: str) -> Reply:
        request, reason = self._fence(call)
        if request not in self.answers:
            ids = [group_id for state in LIVE_STATES for group_id in self.queue(state)][:CHUNK]
            for group_id in ids:
                self._drop(group_id, reason)
            self.answers[request] = len(ids)
        return int(self.answers[request])

    # ---- rollback ----

    def check_records(self, checkpoint: str, before: str, version: str, *ids: str) -> Reply:
        trained = self._trained()
        if any(trained.get(group_id, int(version)) != int(version) for group_id in ids):
            raise LedgerError("Redis knows it as trained in another version")
        above = max(int(checkpoint), int(before))
        later = [one for one in trained.values() if above < one <= int(version)]
        if any(trained[one] == min(later, default=-1) and one not in ids for one in trained):
            raise LedgerError("no record of that version holds it")
        return 1

    def restore_batch(self, *call: str) -> Reply:
        checkpoint, number, *ids = self._fence(call)
        version, is_later = int(number), int(number) > int(checkpoint)
        for group_id in ids:
            if is_later:
                self._restore(group_id, version)
            elif group_id not in self.committed:
                if group_id not in self.groups or self.groups[group_id].state != "trained":
                    self._restore(group_id, version)
                self.limiter.retire([group_id])
                self._commit_group(group_id)
        if is_later:
            self.published_version = min(self.published_version, version - 1)
            self.committed_version = min(self.committed_version, version - 1)
        return 1

    def end_rollback(self, *call: str) -> Reply:
        checkpoint, last = map(int, self._fence(call))
        if self._commit_first(checkpoint):
            return 0
        claimed = self.queue("scored_claimed")[:CHUNK]
        for group_id in claimed:
            self.groups[group_id].state = "scored_waiting"
        if len(claimed) == CHUNK:
            return 0
        self.scored_answer = None
        self.published_version = self.committed_version = checkpoint
        self.recorded_version = last
        return 1

    # ---- the registry ----

    def register_sampler(self, name: str, address: str, _tensor_parallel_size: str) -> Reply:
        self.samplers[name] = SamplerEntry(address)
        return self.register_service(name, address)

    def register_service(self, name: str, _address: str) -> Reply:
        self.beats[name] = self.now_ms
        self.generations[name] = max(self.generations.get(name, 0) + 1, self.now_us)
        self.starts[name] = self.starts.get(name, 0) + 1
        return self.generations[name]

    def give_back(self, worker: str) -> Reply:
        leases = [(group.token, one) for one, group in self.groups.items() if group.worker == worker]
        for _, group_id in sorted(leases, reverse=True)[:CHUNK]:
            self._lose_holder(group_id, self.groups[group_id].state.removesuffix("_leased"))
        return int(len(leases) <= CHUNK)

    def counts(self) -> Reply:
        self._sweep_all()
        states = [*LIVE_STATES, "trained"]
        figures = self.figures() | {state: len(self.queue(state)) for state in states}
        figures |= {"outstanding": len(self.limiter.outstanding), "published_version": self.published_version}
        figures |= {"consecutive_drops": self.consecutive_drops, "incarnation": self.incarnation}
        figures |= {"set_aside": len(self.set_aside)}
        return [value for pair in figures.items() for value in pair]

    def verify_groups(self, *_ids: str) -> Reply:
        return []

    def verify_totals(self) -> Reply:
        return []

    def heartbeat(self, name: str, generation: str, *_report: str) -> Reply:
        known = self.generations.get(name, 0)
        if known < int(generation or 0):
            raise LostWritesError("has lost the registration")
        if generation and known > int(generation):
            return "replaced"
        self.beats[name] = self.now_ms
        return "left" if name in self.orders["left"] else ""

    def samplers_alive(self, seconds: str) -> Reply:
        rows: list[Any] = []
        for name, one in sorted(self.samplers.items()):
            alive = int(self.now_ms - self.beats.get(name, 0) <= float(seconds) * 1000)
            rows += [name, one.address, one.state, one.version, one.incarnation, 1, alive]
            rows += [self.generations[name], self.starts[name]]
        return rows

    def admit_sampler(self, *call: str) -> Reply:
        name, generation, version = self._fence(call)
        if name not in self.samplers or generation not in ("", str(self.generations[name])):
            return 0
        if int(version) != self.published_version:
            return 0
        self._make_live(name, int(version), self.incarnation)
        return 1

    def order(self, _owner: str, what: str, *names: str) -> Reply:
        self.orders[what] = set(names)
        return 1
