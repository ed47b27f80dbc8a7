"""A dashboard reaches a controller whose certificate names no address, as in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.protos import control_pb2
from tandem.protos.errors import TandemError
from tandem.services.commands.certs import write_certificates
from tandem.services.rpc.certificates import server_credentials
from tandem.services.rpc.tokens import Role
from tests.services.dashboard.conftest import shown_run
from tests.support.certificates import issue


@pytest.mark.parametrize(("server_name", "reaches"), [("services.example.org", True), ("other.example.org", False)])
def test_the_name_of_the_recipe_is_asked_for(tmp_path: Path, redis_url: str, server_name: str, reaches: bool) -> None:
    certificates = tmp_path / "certificates"
    write_certificates(certificates, [], 1)
    issue(certificates, "service", host="services.example.org")
    credentials = server_credentials(certificates, "services.example.org", client_certificates=True)
    settings = {"certificates": str(certificates), "server_name": server_name}
    order = control_pb2.ScaleRequest(service="rollout", replicas=2)
    with shown_run(tmp_path, redis_url, credentials, **settings) as site:
        assert site.source.look() and site.source.secret() == site.secret
        if reaches:
            site.source.order(Role.operate, "Scale", order)
        else:
            with pytest.raises(TandemError, match="certificate is not for this address"):
                site.source.order(Role.operate, "Scale", order)
        assert site.controller.orders == [("rollout", 2)] * reaches
