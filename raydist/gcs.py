"""Whether a Ray answers at an address: its GCS, the head's own store. (driver)"""

from __future__ import annotations

from raydist.errors import LaunchError

ANSWER_S = 10.0
"""Longest wait for a Ray to say that it is there; a GCS under load takes a second or two."""


def answers(address: str) -> bool:
    """Whether a Ray answers at host:port. A LaunchError where it has another token: ray.init would try for ever."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    use_token()
    channel = init_grpc_channel(address)
    try:
        NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=ANSWER_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise LaunchError(
                f"the Ray at {address} has another token than this process: give its own in RAY_AUTH_TOKEN_PATH or "
                "~/.ray/auth_token, or say RAY_ADDRESS=local to start a Ray here"
            ) from error
        return False
    finally:
        channel.close()
    return True


def use_token() -> None:
    """Show a cluster the token of this person from now on, if there is one: what Ray's own commands do first."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
