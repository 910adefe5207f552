"""What the collectives declare of NCCL against the headers of its package, and how it is found at run time."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from glm_mtp_export.plugin_library import PluginLibrary
from glm_mtp_export.runtime.collectives import Collectives

KERNELS = Path(__file__).parents[2] / "plugins" / "kernels"
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
CHECK = """
#include <nccl.h>
#include "nccl_abi.h"
#include <type_traits>
using namespace glm::nccl;
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && sizeof(UniqueId) == NCCL_UNIQUE_ID_BYTES, "id");
static_assert(sizeof(ncclResult_t) == sizeof(Result) && int(ncclSuccess) == kSuccess, "result");
static_assert(int(ncclInProgress) == kInProgress, "in progress");
static_assert(sizeof(ncclDataType_t) == sizeof(DataType) && int(ncclUint8) == kUint8, "u8");
static_assert(int(ncclUint64) == kUint64 && int(ncclFloat32) == kFloat32 && int(ncclBfloat16) == kBfloat16, "types");
static_assert(sizeof(ncclRedOp_t) == sizeof(Reduction) && int(ncclMax) == kMax, "max");
static_assert(sizeof(ncclComm_t) == sizeof(Communicator), "communicator");
#define SAME(name) static_assert(Arity<decltype(&::name)>::value == Arity<decltype(Functions::name)>::value, #name)
template <typename> struct Arity;
template <typename R, typename... A> struct Arity<R (*)(A...)> { static constexpr int value = sizeof...(A); };
SAME(ncclGetUniqueId); SAME(ncclCommInitRank); SAME(ncclCommDestroy); SAME(ncclCommAbort); SAME(ncclCommGetAsyncError);
SAME(ncclGetErrorString); SAME(ncclGetLastError); SAME(ncclAllGather); SAME(ncclAllReduce); SAME(ncclSend);
SAME(ncclRecv); SAME(ncclGroupStart); SAME(ncclGroupEnd);
static_assert(std::is_same<decltype(&::ncclAllGather), ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t,
    ncclComm_t, cudaStream_t)>::value, "order of the arguments");
static_assert(std::is_same<decltype(&::ncclAllReduce), ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t,
    ncclRedOp_t, ncclComm_t, cudaStream_t)>::value, "order of the arguments");
static_assert(std::is_same<decltype(&::ncclSend), ncclResult_t (*)(const void*, size_t, ncclDataType_t, int, ncclComm_t,
    cudaStream_t)>::value, "order of the arguments");
static_assert(std::is_same<decltype(&::ncclCommInitRank), ncclResult_t (*)(ncclComm_t*, int, ncclUniqueId, int)>::value, "");
int main() { return 0; }
"""


def nccl_include() -> Path:
    """Folder of nccl.h in the installed package."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    folders = [Path(folder) / "include" for folder in (spec.submodule_search_locations if spec else None) or []]
    found = [folder for folder in folders if (folder / "nccl.h").is_file()]
    if not found:
        pytest.skip("nvidia-nccl-cu13 is not installed")
    return found[0]


@pytest.mark.skipif(shutil.which("g++") is None or not CUDA_INCLUDE.is_dir(), reason="needs g++ and the CUDA headers")
def test_own_declaration_is_nccls(tmp_path: Path) -> None:
    source = tmp_path / "check.cpp"
    source.write_text(CHECK, encoding="utf-8")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{KERNELS / 'src'}", f"-I{KERNELS / 'include'}"]
    subprocess.run([*command, f"-isystem{nccl_include()}", f"-isystem{CUDA_INCLUDE}", str(source)], check=True)


def test_the_library_loads_without_nccl_and_finds_it_in_its_package(plugin_library: PluginLibrary) -> None:
    ctypes.CDLL(str(plugin_library.path.resolve()))  # before anything could have loaded NCCL
    needed = subprocess.run(["readelf", "-d", str(plugin_library.path)], capture_output=True, text=True, check=False)
    assert "nccl" not in needed.stdout
    nccl_include()
    group = Collectives(plugin_library.path)
    assert len(group.unique_id()) == 128 and group.direct_bytes == 0
    group.check()
    group.close()
