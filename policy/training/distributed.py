"""The trainer's process group and DeepSpeed's start: gloo on CPU, no compiled ops, quiet."""

import contextlib
import logging
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist


def ensure_process_group() -> None:
    """Join the group that torchrun or the caller announced by RANK and WORLD_SIZE, or make one of a single process."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def load_deepspeed() -> Any:
    """Import DeepSpeed so that nothing is compiled at run time and only warnings are logged."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # torchrun sets it; DeepSpeed refuses to start without it
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # its shared-memory collectives would be compiled for a minute at the first start; gloo gives the same result
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ensure_process_group()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def gather_objects(value: Any) -> list[Any]:
    """One value of every rank, in rank order."""
    world = dist.get_world_size()
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


def shutdown() -> None:
    """Leave the process group; without it a process may abort at exit. A later train step makes a new one."""
    if not dist.is_initialized():
        return
    deepspeed = sys.modules.get("deepspeed")
    with contextlib.suppress(RuntimeError):
        if deepspeed is not None and deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()  # forgets the copies of the group that DeepSpeed keeps
        else:
            dist.destroy_process_group()
