"""Environment services in the Helm chart. `test_helm.py` has what they share with the other services."""

from __future__ import annotations

from pathlib import Path

from tandem.services.environments.service import DRAIN_SECONDS
from tests.deploy.test_helm import VARIANTS, of_kind, pods, refused, render


def test_environment_services_are_there_where_the_recipe_has_them(tmp_path: Path) -> None:
    assert "environments" not in pods(render(tmp_path, {}))
    manifests = render(tmp_path, VARIANTS["environments"])
    (deployment,) = [one for one in of_kind(manifests, "Deployment") if one["metadata"]["name"] == "mine-environments"]
    assert deployment["spec"]["replicas"] == 3
    pod = pods(manifests)["environments"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > DRAIN_SECONDS
    assert "runs" not in {volume["name"] for volume in pod["spec"]["volumes"]}, "environments see no run folder"
    recipe = '[environment]\npath = "a:B"\nservice = true\n'
    assert "environments" in pods(render(tmp_path, {"recipe": recipe, "environments": {"enabled": True}}))
    for values in (
        {"recipe": recipe},
        {"environments": {"enabled": True}},
        {"recipe": "# service = true", "environments": {"enabled": True}},
        {"recipe": recipe, "environments": {"enabled": True}, "overrides": ["environment.service=false"]},
    ):
        said = "environments.enabled has to be what environment.service of the recipe is"
        assert said in refused(tmp_path, values)
