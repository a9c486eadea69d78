"""The Xids of NVIDIA's driver: what they mean, and whether the GPU is at fault. (pure)

NVIDIA's catalogue: https://docs.nvidia.com/deploy/xid-errors/
"""

from __future__ import annotations

from raydist.shared.outcome import GPU_AT_FAULT

FAULTS = {
    48: "double-bit ECC error",
    62: "its internal microcontroller halted",
    64: "ECC row remapping failed",
    74: "NVLink error",
    79: "it has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "its GSP firmware timed out",
    120: "error in its GSP firmware",
    140: "unrecovered ECC error",
    143: "it could not be initialised",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}
"""Those for which the catalogue has the GPU reset or its node looked at, or that end a program
which has done nothing wrong."""
PROGRAM = {
    13: "graphics engine exception: an access out of bounds, or an illegal instruction",
    31: "memory page fault: an access to an invalid address",
    32: "invalid or corrupted push buffer",
    43: "it stopped processing",
    45: "cleanup after an earlier error, or after the program was killed",
    68: "video processor exception",
    69: "graphics engine class error",
    109: "timeout of a context switch",
}
"""Those that a program causes as a rule. The GPU is healthy."""
REPAIRED = {
    63: "ECC row remapping recorded",
    92: "many single-bit ECC errors",
}
"""Those that the GPU handles itself: nothing has failed yet."""
QUIET = 45
"""The Xid that only follows from something else; raydist itself causes it when it stops ranks."""


def describe_xid(number: int, gpu: str) -> str:
    """Return what an Xid means, in one line. `gpu`: the number or the uuid of the GPU."""
    what = f"NVML reported Xid {number} of GPU {gpu}"
    if number in FAULTS:
        return f"{what} ({FAULTS[number]}): {GPU_AT_FAULT}"
    if number in PROGRAM:
        return f"{what} ({PROGRAM[number]}): as a rule the program's error, not the GPU's"
    if number in REPAIRED:
        return f"{what} ({REPAIRED[number]}): nothing has failed yet, but the GPU needs a look"
    return f"{what}: see NVIDIA's catalogue of Xids for it"
