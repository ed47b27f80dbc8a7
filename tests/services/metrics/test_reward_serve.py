"""`tandem reward serve --metrics-port` answers Prometheus with the tokens of its file."""

from __future__ import annotations

from pathlib import Path

import httpx

from tandem.services.rpc.tokens import Role, add_token
from tests.services.metrics.test_names import by_name
from tests.support.reward_process import RewardProcess

PORT = 21970


def test_a_service_of_its_own_shows_its_figures_to_those_who_have_a_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    token = add_token(tokens, "prometheus", Role.read)
    service = RewardProcess(tmp_path / "served", "--metrics-port", str(PORT), "--token-file", str(tokens))
    try:
        url = f"http://127.0.0.1:{PORT}/metrics"
        assert httpx.get(url).status_code == 401
        reply = httpx.get(url, headers={"Authorization": f"Bearer {token}"})
        assert reply.status_code == 200
        found = by_name(reply.content)
        labels = {"run": "", "service": "reward", "replica": "0"}
        assert found["tandem_jobs"] == [(labels, 0.0)]
        assert found["tandem_jobs_unscored_bytes"] == [(labels, 0.0)]
        assert "tandem_start_time_seconds" in found
    finally:
        assert service.terminate() == 0
