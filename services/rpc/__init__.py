"""gRPC for every service. `door` is how calls come in, `server` what listens, `client` how the others are called."""

from tandem.services.rpc.client import connect, connect_async, connect_target, from_rpc_error, translated
from tandem.services.rpc.limits import DEFAULT_RPC_LIMITS, MAX_CALLS, MAX_MESSAGE_BYTES, RpcLimits
from tandem.services.rpc.server import INFO_SERVICE, Info, Register, RpcServer, ServerThread, start_server

__all__ = [
    "DEFAULT_RPC_LIMITS",
    "INFO_SERVICE",
    "MAX_CALLS",
    "MAX_MESSAGE_BYTES",
    "Info",
    "Register",
    "RpcLimits",
    "RpcServer",
    "ServerThread",
    "connect",
    "connect_async",
    "connect_target",
    "from_rpc_error",
    "start_server",
    "translated",
]
