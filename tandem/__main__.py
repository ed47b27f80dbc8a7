"""The command `tandem`. A base installation lacks the command line's packages: then it names the pip command."""

from __future__ import annotations

import sys

from tandem.protos.errors import EnvironmentLackError
from tandem.protos.extras import missing_extra_named


def main() -> None:
    """Entry point of the `tandem` script."""
    try:
        with missing_extra_named():
            from tandem.services.cli import main as run_command
    except EnvironmentLackError as error:
        print(f"tandem: {error}", file=sys.stderr)
        sys.exit(2)
    run_command()


if __name__ == "__main__":
    main()
