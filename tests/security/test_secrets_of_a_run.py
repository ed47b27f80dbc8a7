"""A whole run as the user of deploy/redis/users.acl by TLS: only files that need its password have it."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest

from tandem.services.commands.certs import write_certificates
from tests.support.locked_redis import locked_redis, tls_before
from tests.support.whole_run import WholeRun

SECRET = "rEcOgNiSaBlE"
PASSWORD = f"{SECRET}/{SECRET}:{SECRET}@{SECRET}?{SECRET}#{SECRET}"
KEY = "sk-jUdGeS-kEy"
HOLD_IT = {"config.json"}
"""Files that need the URL: the recipe, to resume the run. (The address of a running run is in supervisor.lock.)"""


def holders(folder: Path, secret: str) -> set[str]:
    """The files in the folder with the secret in them."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)) for file in files if secret.encode() in file.read_bytes()}


@pytest.mark.system
@pytest.mark.timeout(400)
def test_a_run_keeps_the_password_of_its_redis(tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    write_certificates(certificates, [], 1)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        locked_redis(Path(short), PASSWORD) as server,
        tls_before(server.socket, certificates) as port,
    ):
        place = f"127.0.0.1:{port}/1?ssl_ca_certs={certificates / 'ca.crt'}"
        url = f"rediss://tandem:{quote(PASSWORD, safe='')}@{place}"
        run = WholeRun(
            tmp_path,
            run={"redis_url": url, "total_batches": 3, "groups_per_batch": 2},
            rollout={"engine": "transformers", "max_response_tokens": 32},
            trainer={"checkpoint_every": 2, "export_every": 2},
        )
        said = [run.tandem("run", str(run.recipe), OPENAI_API_KEY=KEY)]
        said += [run.tandem(command, str(run.folder), OPENAI_API_KEY=KEY) for command in ("status", "ledger")]
        said.append(run.tandem("config", str(run.folder / "config.json"), "--json"))
        said.append(run.tandem("config", str(run.recipe)))
        output = "".join(one.stdout + one.stderr for one in said)
        assert [one.returncode for one in said] == [0] * len(said), output + run.logs()
        with server.admin() as admin:
            refused = {entry["object"].partition("|")[0] for entry in admin.acl_log() if entry["username"] == "tandem"}
    assert refused <= {"client", "config"}
    assert f"rediss://tandem:***@{place}" in output
    assert SECRET not in output and KEY not in output
    assert holders(run.folder, SECRET) == HOLD_IT and holders(run.folder, KEY) == set()
    for name in HOLD_IT:
        assert stat.S_IMODE((run.folder / name).stat().st_mode) == 0o600
