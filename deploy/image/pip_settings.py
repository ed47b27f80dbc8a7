"""Writes what a build needs to install packages as this machine's pip does: `pip.conf`, `ca` if pip trusts a file of
authorities, and `folders`, the local folders that the settings name, one a line.
"""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LISTED = ("find-links", "index-url", "extra-index-url")
_KEPT = (*_LISTED, "no-index", "trusted-host", "timeout", "default-timeout", "retries", "proxy")
_SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"


def settings() -> dict[str, str]:
    """Settings of `pip install` by name: those of the environment over those of its files."""
    lines = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in lines:
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key] = value.strip("'\"").replace("\\n", " ")
    return found["global"] | found["install"] | found[":env:"]


def local_folders(values: dict[str, str]) -> list[str]:
    """The existing folders among the indexes and links. The files of a `simple` index may lie beside it."""
    folders = []
    for place in (place for key in _LISTED for place in values.get(key, "").split()):
        path = Path(unquote(urlsplit(place).path) if place.startswith("file:") else place)
        if "://" not in str(path) and path.is_dir():
            folders.append(str(path.parent if path.name == "simple" else path))
    return list(dict.fromkeys(folders))


def main(out: Path) -> None:
    values = settings()
    conf = configparser.RawConfigParser()
    conf["global"] = {key: value for key, value in values.items() if key in _KEPT}
    with open(out / "pip.conf", "w", encoding="utf-8") as file:
        conf.write(file)
    ca = values.get("cert") or os.environ.get("SSL_CERT_FILE") or _SYSTEM_CA
    if Path(ca).is_file():
        shutil.copyfile(ca, out / "ca")
    (out / "folders").write_text("".join(f"{folder}\n" for folder in local_folders(values)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
