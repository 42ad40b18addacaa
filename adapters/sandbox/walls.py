"""Isolation of the current process: namespaces with a small file system, Landlock, limits, no privileges.

Programs that start anew for each run use it, so it imports nothing beyond their own imports. Does not own: system calls
(syscalls), the isolated code.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

NOBODY = 65534
"""User and group of runs that root starts."""
DISK_MB = 64
"""Largest size in megabytes of a file, and with namespaces of all files of a run together."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
SYS_MOUNT_SETATTR = 442  # the same on every architecture, like those of Landlock
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
LANDLOCK_EXECUTE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1, 4, 8
LANDLOCK_RIGHTS = {1: 0x1FFF, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Rights that a ruleset can remove, by the version of Landlock that introduced them."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPABILITY_VERSION_3 = 0x20080522
SIGKILL = 9

libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(files: Mapping[str, list[str]], *, writable: bool) -> None:
    """Enters new namespaces of all kinds, with a file system of the interpreter, the system's libraries and little
    else.

    Args:
        files: absolute paths under `visible`; those under `hidden` are empty directories.
        writable: whether there is a writable /tmp, which is then the working directory.
    """
    others = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:  # mounts with root's rights, since nobody may not read an interpreter in root's home
        call(libc.unshare, CLONE_NEWNS)
        change_root(files, writable=writable)
        become_nobody()
        # In an own user namespace the kernel counts the processes of this run alone.
        call(libc.unshare, CLONE_NEWUSER | others)
        return
    call(libc.unshare, CLONE_NEWUSER | CLONE_NEWNS | others)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    change_root(files, writable=writable)


def change_root(files: Mapping[str, list[str]], *, writable: bool) -> None:
    """Makes a small tmpfs the root: read-only views of `visible` without `hidden`, devices, and an empty /tmp."""
    mount(None, "/", MS_REC | MS_PRIVATE)
    size = f"size={DISK_MB}m,nr_inodes=16k,mode=755"
    mount("tmpfs", "/tmp", MS_NOSUID | MS_NODEV, size)
    os.mkdir("/tmp/old")
    call(libc.pivot_root, b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path in (*files["visible"], *DEVICES):
        source = "/old" + path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):  # inside a visible directory
            continue
        if os.path.islink(source):
            os.symlink(os.readlink(source), path)
        elif os.path.exists(source):
            if os.path.isdir(source):
                os.makedirs(path, exist_ok=True)
            else:
                os.close(os.open(path, os.O_CREAT))
            mount(source, path, MS_BIND | MS_REC)
            if not path.startswith("/dev/"):
                make_read_only(path)
    for path in files["hidden"]:
        if os.path.isdir(path):
            mount("tmpfs", path, MS_NOSUID | MS_NODEV | MS_RDONLY, "size=4k,mode=755")
    for path in ("/tmp", "/dev/shm") if writable else ():
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o1777)
    call(libc.umount2, b"/old", MNT_DETACH)
    os.rmdir("/old")
    if writable:
        os.chdir("/tmp")
    else:
        make_read_only("/", recursive=False)


def landlock_version() -> int:
    """Returns the version of Landlock that this kernel has; 0 if it has none."""
    if not hasattr(libc, "syscall"):
        return 0
    version = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION)
    return max(0, int(version))


def read_only_files(visible: Iterable[str]) -> None:
    """Restricts this process by Landlock to reading files under `visible`; it can open, make and remove no others.

    It must have given up gaining privileges. Names, sizes and times of other files remain visible.
    """
    rights = sum(bits for version, bits in LANDLOCK_RIGHTS.items() if version <= landlock_version())
    handled = (ctypes.c_uint64 * 1)(rights)
    ruleset = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(8), 0)
    if ruleset < 0:
        fail("landlock_create_ruleset")
    for path in visible:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = LANDLOCK_READ_FILE | LANDLOCK_EXECUTE | (LANDLOCK_READ_DIR if os.path.isdir(path) else 0)
        rule = allowed.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)  # a packed struct
        if libc.syscall(SYS_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0) != 0:
            fail("landlock_add_rule")
        os.close(place)
    if libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
        fail("landlock_restrict_self")
    os.close(ruleset)


def limit(bounds: Mapping[int, int]) -> None:
    """Sets resource limits that this process cannot raise again; a lower limit stays."""
    for kind, value in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def give_up_privileges() -> None:
    """Drops all capabilities, and prevents gaining any."""
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    call(libc.capset, header, (ctypes.c_uint32 * 6)())


def close_memory() -> None:
    """Keeps processes of the same user from reading and writing this one's memory, and from dumping it."""
    call(libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)


def open_memory() -> None:
    """Undoes `close_memory`, so that other processes of the user can measure this one."""
    call(libc.prctl, PR_SET_DUMPABLE, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. Becoming another user undoes that."""
    call(libc.prctl, PR_SET_PDEATHSIG, SIGKILL)


def become_nobody() -> None:
    """Changes user and group from root to nobody."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def mount(source: str | None, target: str, flags: int, options: str | None = None) -> None:
    """Calls mount(2); the source "tmpfs" mounts a tmpfs."""
    kind = source.encode() if source == "tmpfs" else None
    data = options.encode() if options else None
    call(libc.mount, source.encode() if source else None, target.encode(), kind, ctypes.c_ulong(flags), data)


def make_read_only(path: str, *, recursive: bool = True) -> None:
    """Forbids writing, set-uid and devices in the mount at `path`, and below it."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call(libc.syscall, SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, ctypes.c_size_t(32))


def call(function: Any, *arguments: Any) -> None:
    """Calls a C function that returns 0, or sets errno."""
    if function(*arguments) != 0:
        fail(function.__name__)


def fail(name: str) -> None:
    """Raises an OSError of errno, for the C function `name`."""
    error = ctypes.get_errno() or errno.EINVAL
    raise OSError(error, f"{name}: {os.strerror(error)}")


def fork(body: Callable[[], int]) -> int:
    """Forks; returns the id of the child, whose exit code is the result of `body`."""
    child = os.fork()
    if child == 0:
        sys.exit(body())
    return child


def exit_code(status: int) -> int:
    """Returns the exit code in a wait status; 128 plus the signal for a killed process, as in shells."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
