"""What the dashboard tells about a run's checkpoints."""

from pathlib import Path

from tandem.services.dashboard.events import Events
from tandem.services.dashboard.figures import Figures
from tandem.trainer.checkpoints.state import STATE_FILE, checkpoint_folder


def test_complete_checkpoints_are_events(tmp_path: Path) -> None:
    for version in (2, 4):
        checkpoint_folder(tmp_path / "checkpoints", version, 3).mkdir(parents=True)
    (checkpoint_folder(tmp_path / "checkpoints", 2, 3) / STATE_FILE).write_text("{}")
    events = Events(tmp_path, Figures(tmp_path, "run"))
    events.read([])
    assert [(event.kind, event.text) for event in events.listed] == [("checkpoint", "version 2 is saved")]
