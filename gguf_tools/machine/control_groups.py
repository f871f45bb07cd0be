"""The control groups (containers) of this process on Linux, whose files hold limits and usage."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ControlGroup:
    """unified: its files are those of version 2, in which all controllers share a folder."""

    folder: Path
    unified: bool


def own_groups(controller: str) -> Iterator[ControlGroup]:
    """The groups of a controller, such as "memory", that this process is in, and those around them.

    Inside a container the path of a group may be the host's, which does not exist there; the mount
    point then shows the container's own group. So a folder need not exist.
    """
    with suppress(OSError):
        for line in _OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            unified = not controllers
            if unified or controller in controllers.split(","):
                mount = _MOUNTED if unified else _MOUNTED / controller
                path = mount / group.strip("/")
                for folder in (path, *path.parents):
                    yield ControlGroup(folder, unified)
                    if folder == mount:
                        break
