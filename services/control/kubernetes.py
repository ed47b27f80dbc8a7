"""The launcher `kubernetes`: samplers, reward services and environment services are Deployments, whose scale the
controller sets.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path

import httpx

from tandem.protos.errors import ConfigError, EnvironmentLackError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.control.launcher import ENVIRONMENTS, SAMPLERS, Registered

DEPLOYMENT_VARIABLES = {
    SAMPLERS: "TANDEM_ROLLOUT_DEPLOYMENT",
    "reward": "TANDEM_REWARD_DEPLOYMENT",
    ENVIRONMENTS: "TANDEM_ENVIRONMENTS_DEPLOYMENT",
}
"""Names of the Deployments, by service. That of the environment services is not set where the release has none."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Token, CA and namespace that Kubernetes puts into the pod."""
DEADLINE_SECONDS = 10.0


class Kubernetes(Registered):
    """Patches the scale of a Deployment with the pod's service account. Raises ConfigError outside a pod."""

    name = "kubernetes"

    def __init__(self, buffer: Buffer, account: Path = SERVICE_ACCOUNT) -> None:
        super().__init__(buffer)
        variables = {service: name for service, name in DEPLOYMENT_VARIABLES.items() if service != ENVIRONMENTS}
        if os.environ.get(DEPLOYMENT_VARIABLES[ENVIRONMENTS]):
            variables = DEPLOYMENT_VARIABLES
        names = (*variables.values(), "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
        if missing := [name for name in names if not os.environ.get(name)]:
            raise ConfigError(f"--launcher kubernetes: {missing[0]} is not set; the Helm chart sets it in the pod")
        self._deployments = {service: os.environ[name] for service, name in variables.items()}
        self.scalable: Sequence[str] = tuple(variables)
        host, port = (os.environ[name] for name in names[-2:])
        self._server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._account = account
        try:
            self._namespace = (account / "namespace").read_text().strip()
            self._context = ssl.create_default_context(cafile=account / "ca.crt")
        except OSError as error:
            fault = f"{error.filename or account}: {error.strerror}"
            raise ConfigError(f"--launcher kubernetes: {fault}; the pod needs a service account's token") from None

    def check(self, service: str, replicas: int) -> None:
        """The cluster's scheduler knows what fits; a pod that does not stays Pending."""

    def set_replicas(self, service: str, replicas: int) -> None:
        """Returns once Kubernetes has taken the order. Raises EnvironmentLackError if it refuses or does not answer."""
        name = self._deployments[service]
        url = f"{self._server}/apis/apps/v1/namespaces/{self._namespace}/deployments/{name}/scale"
        try:
            token = (self._account / "token").read_text().strip()  # it changes while the pod lives
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
            content = f'{{"spec":{{"replicas":{replicas}}}}}'
            timeout = DEADLINE_SECONDS
            with httpx.Client(verify=self._context, trust_env=False, timeout=timeout) as client:
                reply = client.patch(url, content=content, headers=headers)
        except (OSError, httpx.HTTPError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise EnvironmentLackError(f"{service}={replicas}: Kubernetes at {self._server}: {fault}") from None
        if reply.is_error:
            raise EnvironmentLackError(
                f"{service}={replicas}: Kubernetes refuses to scale the Deployment {name} ({reply.status_code}): "
                f"{_message(reply)}"
            )

    def drain(self, sampler: str) -> None:
        """Raises UserError: Kubernetes chooses which pod it removes."""
        raise UserError(f"Kubernetes chooses which sampler leaves, not {sampler}; order fewer by `tandem scale`")

    def request_stop(self) -> None:
        """Raises UserError: Kubernetes starts containers again that have ended."""
        raise UserError("Kubernetes would start the services again; stop the run by `helm uninstall`, which keeps it")


def _message(reply: httpx.Response) -> str:
    """What Kubernetes says in a Status object, in one line."""
    try:
        said = str(reply.json()["message"])
    except (ValueError, KeyError, TypeError):
        said = reply.text
    return " ".join(said.split())[:300] or "it says nothing"
