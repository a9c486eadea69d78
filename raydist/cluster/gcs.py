"""Test whether Ray's GCS (global control service) answers at an address. (driver)"""

from __future__ import annotations

from raydist.cluster import ray_private
from raydist.shared.errors import LaunchError

ANSWER_S = 10.0
"""Longest wait for the GCS, which takes a second or two under load."""


def answers(address: str) -> bool:
    """Report whether a GCS answers at host:port.

    LaunchError: it refuses this process's token, so ray.init would hang; or it has no token
    authentication and this process does, which would refuse the GCS's calls.
    """
    import grpc

    ray_private.load_auth_token()
    try:
        ray_private.check_alive(address, ANSWER_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise LaunchError(
                f"the Ray at {address} refuses this process's token: put the cluster's token "
                "into ~/.ray/auth_token "
                "or the file of RAY_AUTH_TOKEN_PATH, or set RAY_ADDRESS=local to start a Ray on "
                "this machine"
            ) from error
        return False
    if ray_private.needs_no_token(address, ANSWER_S):
        raise LaunchError(
            f"the Ray at {address} was started with RAY_AUTH_MODE=disabled, and this process has "
            "token authentication: set RAY_AUTH_MODE=disabled here too, or start Ray without it"
        )
    return True
