"""Maps the top-level folders to one import package: `trainer/` is installed as `tandem.trainer`. Everything else is in
pyproject.toml.
"""

from setuptools import find_packages, setup

FOLDERS = ("protos", "reward", "rollout", "services", "trainer")

setup(
    packages=["tandem", *(f"tandem.{name}" for name in find_packages(include=[f"{name}*" for name in FOLDERS]))],
    package_dir={"tandem": "tandem", **{f"tandem.{name}": name for name in FOLDERS}},
)
