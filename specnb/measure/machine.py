"""Whether this machine is quiet enough to measure on.

It knows processor and GPUs by what they do now. It does not know what will be measured. What machine this is says
`specnb.timing.environment`.
"""

from specnb.timing import gpu_state

BUSY_PERCENT = 15  # Above this mean use of the processor by others a measurement is worthless.


def busy_reasons(device=None):
    """Why a measurement started now would be worthless; an empty list on a quiet machine.

    Ask before a model is loaded: inside a container a process cannot tell its own use of a GPU from others'.

    Parameters
    ----------
    device : torch.device, optional
        Where the models will be. Work on other GPUs is no reason, and on a CPU none on any. By default all GPUs count
        that this process may use.
    """
    import psutil

    reasons = []
    used = min(psutil.cpu_percent(interval=1.0) for _ in range(2))  # A short burst is over after a second.
    if used > BUSY_PERCENT:
        reasons.append(f"{used:.0f} % of the processor is in use (at most {BUSY_PERCENT} % is allowed)")
    for index, gpu in enumerate(gpu_state()):
        ours = device is None or (device.type == "cuda" and index == (device.index or 0))
        if ours and gpu["num_processes"]:
            reasons.append(f"{gpu['num_processes']} processes use GPU {index} ({gpu['name']})")
    return reasons
