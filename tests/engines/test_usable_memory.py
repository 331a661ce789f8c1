"""The memory that a process may still take is found on any machine and in containers."""

import os
from pathlib import Path

import pytest
import torch

from openclaw_rl.engines.host import usable_memory
from openclaw_rl.engines.local.model import placement
from openclaw_rl.engines.local.process import sampler_worker
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions

GIB = 1 << 30
#: How the first version of control groups writes that there is no limit.
UNLIMITED = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB"}


def test_without_limits_it_is_what_is_available(tmp_path: Path) -> None:
    root = write(tmp_path, {**MACHINE, "proc/self/cgroup": "0::/a.slice", "sys/fs/cgroup/a.slice/memory.max": "max"})
    assert usable_memory(root) == 12 * GIB


def test_where_the_system_does_not_say_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("path", ["/", "/../../on-the-host", "/not/there"])
def test_in_a_container_it_is_what_its_limit_leaves(tmp_path: Path, path: str) -> None:
    group = {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}"}
    files = {**MACHINE, "proc/self/cgroup": f"0::{path}"}
    root = write(tmp_path, {**files, **{f"sys/fs/cgroup/{name}": content for name, content in group.items()}})
    # Cached files are given up when memory is needed.
    assert usable_memory(root) == 2 * GIB


def test_the_limits_of_groups_around_it_count_too(tmp_path: Path) -> None:
    files = {**MACHINE, "proc/self/cgroup": "0::/outer/inner"}
    for name, limit in (("outer", 3 * GIB), ("outer/inner", 8 * GIB)):
        files |= {f"sys/fs/cgroup/{name}/memory.max": limit, f"sys/fs/cgroup/{name}/memory.current": GIB}
    assert usable_memory(write(tmp_path, files)) == 2 * GIB


@pytest.mark.parametrize(("limit", "expected"), [(5 * GIB, 4 * GIB), (UNLIMITED, 12 * GIB), (GIB // 2, 0)])
def test_the_first_version_of_control_groups(tmp_path: Path, limit: int, expected: int) -> None:
    folder = "sys/fs/cgroup/memory/docker/1"
    groups = "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/system.slice"
    files = {**MACHINE, "proc/self/cgroup": groups}
    files |= {f"{folder}/memory.limit_in_bytes": limit, f"{folder}/memory.usage_in_bytes": GIB}
    assert usable_memory(write(tmp_path, files)) == expected


@pytest.mark.parametrize(("free", "expected"), [(2 * GIB, GIB // 2), (100 * GIB, 4 * GIB)])
def test_the_cache_of_keys_and_values_takes_a_quarter(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    monkeypatch.setattr(placement, "usable_memory", lambda: free)
    assert (
        sampler_worker.cache_bytes(WorkerOptions(Path(), "cpu", "float32", 4, None, None, 2, 4), torch.device("cpu"))
        == expected
    )


def test_this_machine_has_some() -> None:
    assert usable_memory() > 0
