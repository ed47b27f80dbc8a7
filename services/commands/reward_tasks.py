"""Implements the commands of `tandem reward`. Each returns its exit code; docs/reward.md lists the codes."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.error_text import did_you_mean
from tandem.protos.errors import ScorerError, UserError
from tandem.services.addresses import DEFAULT_PORT, check_listening, named_addresses
from tandem.services.clients import RewardClient
from tandem.services.command_line import print_text
from tandem.services.commands.reward_display import Faults, columns, number, score_line, sum_line
from tandem.services.data.completions import CompletionFile, Fields
from tandem.services.data.score_file import ScoreFile, row_of

MOST_ROWS_AT_ONCE = 10_000
"""Maximum number of rows for `tandem reward score`. Larger files are submitted as jobs."""


def rubric_text(rubric: Path | None, scorer: str, arguments: Sequence[str] | None) -> str:
    """The rubric as TOML; empty for the service's default. Raises UserError for options that cannot be used."""
    if rubric is not None:
        if scorer or arguments:
            raise UserError("--rubric and --scorer exclude one another; a rubric's file has its scorers' arguments")
        return _read_rubric(rubric)
    if not scorer:
        if arguments:
            raise UserError(f"--argument {arguments[0]} needs --scorer: which scorer is it for?")
        return ""
    lines = ["[[components]]", f"scorer = {json.dumps(scorer)}"]
    if arguments:
        lines += ["[components.arguments]", *map(_argument, arguments)]
    return "\n".join(lines) + "\n"


def _read_rubric(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ScorerError(f"rubric {file} is not text; a rubric is a TOML file") from None
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ScorerError(f"rubric {file}: {reason}; see examples/rubrics for some to start from") from None


def _argument(text: str) -> str:
    """`name=value` as a line of TOML. A value that is not valid TOML becomes a string."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UserError(f"--argument {text!r}: write NAME=VALUE, e.g. tolerance=0.01")
    with suppress(tomllib.TOMLDecodeError):
        if list(tomllib.loads(f"v = {value}")) == ["v"]:
            return f"{name} = {value}"
    return f"{name} = {json.dumps(value)}"


def connect(address: str) -> RewardClient:
    """Connects to the service. Raises UnavailableError immediately if none of its addresses answers."""
    check_listening(named_addresses(address))
    return RewardClient(address)


def single_completion(
    solution: str, ground_truth: str | None, data_source: str, extra_info: str
) -> list[ScoreItem | Unscored]:
    """The only item. Raises UserError if `extra_info` is not a JSON object."""
    try:
        extra = json.loads(extra_info) if extra_info else {}
    except ValueError as error:
        raise UserError(f"--extra-info is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UserError(f"--extra-info is {extra_info!r:.80}, not a JSON object")
    return [ScoreItem(data_source, solution, ground_truth, extra)]


def items_of_file(file: str, fields: Fields) -> list[ScoreItem | Unscored]:
    """The rows of a small file; reports those that cannot be scored."""
    completions = CompletionFile(file, fields)
    items = list(islice(completions, MOST_ROWS_AT_ONCE + 1))
    if len(items) > MOST_ROWS_AT_ONCE:
        excess = f"{completions.name} has more than {MOST_ROWS_AT_ONCE:,} rows"
        raise UserError(f"{excess}; `tandem reward submit` takes any number")
    faults = Faults(completions)
    for index, item in enumerate(items):
        if isinstance(item, Unscored):
            faults.tell(index, item)
    faults.close()
    return items


def score_now(
    address: str, rubric: str, items: Sequence[ScoreItem | Unscored], *, out: Path | None, as_json: bool, strict: bool
) -> int:
    with connect(address) as client:
        scores = client.score(items, rubric)
        scored_by = "" if rubric or as_json else f"; scorer: {_default_of(client)} (the service's default)"
    if out is not None:
        with ScoreFile(out) as written:
            written.add(0, scores)
            written.finish()
    else:
        for index, score in enumerate(scores):
            print_text(json.dumps(row_of(index, score)) if as_json else score_line(index, score))
    if not as_json:
        print_text(_sum_of(scores) + scored_by)
    return int(strict and not all(isinstance(score, Scored) for score in scores))


def _default_of(client: RewardClient) -> str:
    """The names of the scorers in the service's default rubric."""
    components = tomllib.loads(client.scorers().default_rubric).get("components", [])
    return ", ".join(str(component.get("scorer")) for component in components) or "its rubric"


def _sum_of(scores: Sequence[Score]) -> str:
    values = [score.value for score in scores if isinstance(score, Scored)]
    reasons = Counter(str(score.reason) for score in scores if isinstance(score, Unscored))
    return sum_line(len(values), sum(values) / max(len(values), 1), reasons)


def list_scorers(address: str, name: str | None) -> int:
    """Prints the list of scorers, or the parameters of one scorer."""
    with connect(address) as client:
        told = client.scorers()
    if name is None:
        rows = [(one.name, one.version or "–", one.isolation, one.summary) for one in told.scorers]
        print_lines(columns(("scorer", "version", "runs", "what it does"), rows))
        print_lines(["", "limits: " + ", ".join(f"{key} {number(told.limits[key])}" for key in sorted(told.limits))])
        return 0
    found = next((one for one in told.scorers if one.name == name), None)
    if found is None:
        raise ScorerError(f"there is no scorer {name!r}{did_you_mean(name, (one.name for one in told.scorers))}")
    print_text(f"{found.name}, version {found.version or '–'}, runs {found.isolation}: {found.summary}")
    rows4 = [(p.name, p.type, p.default or "must be given", p.description) for p in found.parameters]
    print_lines(columns(("parameter", "type", "default", "meaning"), rows4) if rows4 else ["it has no parameters"])
    return 0


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print_text(line.rstrip())


def serve_alone(
    arguments: Sequence[str],
    *,
    host: str,
    port: int | None,
    redis_url: str,
    folder: Path,
    name: str,
    token_file: Path | None = None,
    certificates: Path | None = None,
    client_certificates: bool = False,
    insecure: bool = False,
    metrics_port: int = 0,
) -> None:
    """Runs a standalone service until it is stopped. Raises UserError for an unusable setting, scorer or Redis."""
    from tandem.services.config.recipe import load_service_config
    from tandem.services.process import starting
    from tandem.services.rpc.certificates import http_context, server_credentials
    from tandem.services.rpc.server import Security
    from tandem.services.rpc.tokens import Tokens

    files = [one for one in arguments if "=" not in one]
    if len(files) > 1:
        raise UserError(f"{files[1]!r} is a second configuration; write settings as section.key=value")
    config = load_service_config(files[0] if files else None, [one for one in arguments if "=" in one])
    if client_certificates and certificates is None:
        raise UserError("--client-certificates needs --certificates: the folder with the CA that signs them")
    security: Security = {
        "tokens": None if token_file is None else Tokens.load(token_file),
        "credentials": None
        if certificates is None
        else server_credentials(certificates, client_certificates=client_certificates),
        "insecure": insecure,
    }
    chosen = port if port is not None else config.reward.port or DEFAULT_PORT
    reward = config.reward.model_copy(update={"port": chosen})
    with starting():
        from tandem.services.reward import standalone as reward_standalone
    reward_standalone.main(
        config.model_copy(update={"reward": reward}),
        host=host,
        redis_url=redis_url,
        folder=folder,
        name=name,
        security=security,
        metrics_port=metrics_port,
        http_tls=None if certificates is None else http_context(certificates, client_certificates=client_certificates),
    )
