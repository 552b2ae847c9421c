"""Memory of this machine, or of the container that a process is in."""

from pathlib import Path


def host_free_bytes() -> int:
    """What this machine, or the container that this process is in, has left."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        most, now = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        cached = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except OSError:  # no container, or an old one
        return free_bytes
    return free_bytes if most == "max" else min(free_bytes, int(most) - int(now) + int(cached["inactive_file"]))
