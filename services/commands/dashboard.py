"""`tandem dashboard`: a web page that shows runs and steers them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem.protos.errors import UserError
from tandem.protos.extras import missing_extra_named
from tandem.services.command_line import print_error, print_text
from tandem.services.commands.status import ledger_of
from tandem.services.run.folder import find_run


def show_dashboard(
    runs: Sequence[str], *, host: str, port: int, names: Sequence[str], certificates: Path | None, insecure: bool
) -> int:
    """Serves the page until a signal. Raises UserError for folders, an address or certificates that cannot be used."""
    with missing_extra_named():
        from tandem.services.dashboard.app import dashboard
        from tandem.services.dashboard.run_source import RunSource
        from tandem.services.dashboard.server import check_access, listen, serve

    folders = [find_run(run) for run in runs] or [find_run(None)]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a run is named twice; name each once")
    exposure = check_access(host, certificates, insecure=insecure)
    with ExitStack() as stack:
        sources = [RunSource(folder, stored_secret) for folder in folders]
        for source in sources:
            stack.callback(source.close)
        listening = stack.enter_context(listen(host, port))
        if exposure:
            print_error(f"warning: {exposure}")
        place, bound = listening.getsockname()[:2]
        scheme = "http" if certificates is None else "https"
        shown = f"[{place}]" if ":" in place else place
        print_text(f"{scheme}://{shown}:{bound} · log in with: tandem token {folders[0]} --role read (or operate)")
        serve(dashboard(sources, names, tls=certificates is not None), listening, certificates)
    return 0


def stored_secret(folder: Path) -> str:
    """The secret of a run that is not running, from its files."""
    with ledger_of(folder) as buffer:
        return buffer.secret()
