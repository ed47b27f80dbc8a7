"""gRPC for every service. `door` is how calls come in, `server` what listens, `client` how the others are called."""

from services.rpc.client import connect, connect_async, connect_target, from_rpc_error, translated
from services.rpc.door import MAX_CALLS, MAX_MESSAGE_BYTES, USUAL_INTAKE, Intake
from services.rpc.server import INFO_SERVICE, Info, Register, RpcServer, ServerThread, start_server

__all__ = [
    "INFO_SERVICE",
    "MAX_CALLS",
    "MAX_MESSAGE_BYTES",
    "USUAL_INTAKE",
    "Info",
    "Intake",
    "Register",
    "RpcServer",
    "ServerThread",
    "connect",
    "connect_async",
    "connect_target",
    "from_rpc_error",
    "start_server",
    "translated",
]
