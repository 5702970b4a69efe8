"""What Horovod says about how it was built, answered for what is really here."""

from __future__ import annotations

import torch
import torch.distributed as dist

from syncline.horovod.common.environment import env

__all__ = [
    "ccl_built", "check_extension", "cuda_built", "ddl_built", "env", "extension_available", "gloo_built",
    "gloo_enabled", "gpu_available", "is_iterable", "is_version_greater_equal_than", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "num_rank_is_power_2", "rocm_built",
]  # fmt: skip


def mpi_built(verbose: bool = False) -> bool:
    """Collectives never travel over MPI; `mpirun` may start the ranks all the same."""
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def gloo_built(verbose: bool = False) -> bool:
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    return dist.is_gloo_available()


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version as one number, 21903 for 2.19.3; 0 where torch has no NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def cuda_built(verbose: bool = False) -> bool:
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    return torch.version.hip is not None


def ddl_built(verbose: bool = False) -> bool:
    return False


def ccl_built(verbose: bool = False) -> bool:
    return False


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    return torch.cuda.is_available()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether Horovod serves this framework here."""
    return ext_base_name == "torch"


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Refuse a framework that is not served."""
    if not extension_available(ext_name.rpartition(".")[2] or ext_name):
        raise ImportError(f"Extension {ext_name} has not been built: Syncline serves horovod.torch alone.")


def is_iterable(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(version: str, than: str) -> bool:
    """Compares dotted numbers."""
    return _numbers(version) >= _numbers(than)


def _numbers(version: str) -> list[int]:
    parts = version.partition("+")[0].split(".")
    return [int("".join(filter(str.isdigit, part)) or 0) for part in parts]


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank != 0 and num_rank & (num_rank - 1) == 0
